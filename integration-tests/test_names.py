"""No class name stands twice in the packages. The clients are exempt, as users know the names of their classes."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def sources() -> Iterator[tuple[str, str]]:
    """Path and text of each source file of the packages, except tests and the generated files of proto/."""
    for package in sorted(path.parent for path in ROOT.glob("[a-z]*/*/__init__.py")):
        if package.parent.name != "proto":
            for path in sorted(package.rglob("*.py")):
                if "tests" not in path.parts:
                    yield str(path.relative_to(ROOT)), path.read_text()


def doubles(files: Iterable[tuple[str, str]]) -> list[str]:
    places: dict[str, list[str]] = {}
    for name, text in files:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{name}:{node.lineno}")
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def test_no_class_name_stands_twice() -> None:
    found = doubles(sources())
    assert not found, "each class needs a name of its own:\n" + "\n".join(found)


def test_all_packages_are_looked_at() -> None:
    assert {name.split("/")[0] for name, _ in sources()} >= {
        "benchmark",
        "common",
        "launcher",
        "router",
        "server",
        "tools",
    }


def test_a_class_name_that_stands_twice_is_found() -> None:
    files = [("a.py", "class Limits: ...\nclass Rows: ..."), ("b.py", "def f():\n    class Limits: ...")]
    assert doubles(files) == ["Limits: a.py:1, b.py:2"]
