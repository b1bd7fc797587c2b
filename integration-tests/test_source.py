"""No source file of this repository executes code that it reads from a file or a network. No class name stands twice in
the packages, except in the clients, whose users know the names of classes."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "benchmark/text_generation_benchmark clients/python/text_generation common/text_generation_common "
    "launcher/text_generation_launcher router/text_generation_router server/text_generation_server tools/demo_model "
    "tools/gpu_check"
).split()
FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
CONVERTER = "server/text_generation_server/weights/convert.py"


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    ours = [path for path in paths if "tests" not in path.relative_to(ROOT).parts]
    return tuple((str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in ours)


def offences(name: str, tree: ast.Module) -> list[str]:
    found = [(node, offence) for node in ast.walk(tree) if (offence := _offence(node, name))]
    return [f"{name}:{node.lineno}: {offence}" for node, offence in found]  # type: ignore[attr-defined]


def _offence(node: ast.AST, name: str) -> str:
    if isinstance(node, ast.Import | ast.ImportFrom):
        if name == CONVERTER and ast.unparse(node) == "import pickle":
            return ""  # allowed because only its error class is named; pickle's loads and Unpickler are never called
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        bad = {module.split(".")[0] for module in modules} & FORBIDDEN_MODULES
        return f"imports {', '.join(bad)}" if bad else ""
    if not isinstance(node, ast.Call):
        return ""
    called = ast.unparse(node.func)
    if called.split(".")[0] in FORBIDDEN_MODULES:
        return f"calls {called}"
    if called.removeprefix("builtins.") in FORBIDDEN_CALLS:
        return f"calls {called}"
    if called == "torch.load" and not (name == CONVERTER and _loads_weights_only(node)):
        return "calls torch.load"
    trusting = [word for word in node.keywords if word.arg in ("trust_remote_code", "allow_pickle")]
    return "trusts code of a model" if any(_is(word.value, True) for word in trusting) else ""


def _loads_weights_only(call: ast.Call) -> bool:
    return any(word.arg == "weights_only" and _is(word.value, True) for word in call.keywords)


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_no_source_of_ours_runs_what_came_as_data() -> None:
    found = [offence for name, tree in sources() for offence in offences(name, tree)]
    assert found == []


def test_all_packages_are_looked_at() -> None:
    names = [name for name, _ in sources()]
    assert CONVERTER in names
    assert all(any(name.startswith(package) for name in names) for package in PACKAGES)


@pytest.mark.parametrize(
    "source",
    [
        "import _pickle",
        "pickle.loads(data)",
        "pickle.Unpickler(file)",
        "from dill import loads",
        "import os, marshal",
        "def f():\n    import shelve.x",
        "eval('1')",
        "builtins.exec(text)",
        "compile(text, '', 'exec')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_each_way_is_recognised(source: str) -> None:
    assert offences(CONVERTER, ast.parse(source))


def test_the_converter_alone_may_load_and_weights_only() -> None:
    tree = ast.parse("import pickle\nre.compile('a')\nmodel.eval()\ntorch.load(path, weights_only=True)")
    assert offences(CONVERTER, tree) == []
    assert len(offences("server/text_generation_server/server.py", tree)) == 2


def files() -> Iterator[tuple[str, str]]:
    """Path and text of each source file of the packages, except tests and the generated files of proto/."""
    for package in sorted(path.parent for path in ROOT.glob("[a-z]*/*/__init__.py")):
        if package.parent.name != "proto":
            for path in sorted(package.rglob("*.py")):
                if "tests" not in path.relative_to(ROOT).parts:
                    yield str(path.relative_to(ROOT)), path.read_text()


def doubles(texts: Iterable[tuple[str, str]]) -> list[str]:
    places: dict[str, list[str]] = {}
    for name, text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{name}:{node.lineno}")
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def test_no_class_name_stands_twice() -> None:
    found = doubles(files())
    assert not found, "each class needs a name of its own:\n" + "\n".join(found)


def test_all_packages_are_looked_at_for_class_names() -> None:
    folders = {"benchmark", "common", "launcher", "router", "server", "tools"}
    assert {name.split("/")[0] for name, _ in files()} >= folders


def test_a_class_name_that_stands_twice_is_found() -> None:
    texts = [("a.py", "class Limits: ...\nclass Rows: ..."), ("b.py", "def f():\n    class Limits: ...")]
    assert doubles(texts) == ["Limits: a.py:1, b.py:2"]
