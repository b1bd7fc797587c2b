"""Counts the Python files of each room, a folder with a budget in `pyproject.toml`, and their lines."""

import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent.parent


@dataclass(slots=True)
class Room:
    """What a room uses. The lines of tests are whole lines, and count into no budget."""

    files: int = 0
    code: int = 0
    lines: int = 0
    test_files: int = 0
    test_lines: int = 0


def python_files() -> list[str]:
    """The Python files under version control, and those that git would add: paths relative to the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted({name for name in listed.split("\0") if name and (ROOT / name).is_file()})


def is_test(path: str) -> bool:
    return "/tests/" in path or PurePosixPath(path).name == "conftest.py"


def room_of(path: str, names: Iterable[str]) -> str | None:
    """The room of a file: of `names`, the folder closest to the file. The folder of a package, such as
    `text_generation_router`, is left out of a room's name. A file of the repository's top folder has no room.
    """
    folders = [part for part in PurePosixPath(path).parts[:-1] if not part.startswith("text_generation")]
    known = set(names)
    for end in range(len(folders), 0, -1):
        if (name := "/".join(folders[:end])) in known:
            return name
    return folders[0] if folders else None


def count(paths: Iterable[str], names: Iterable[str]) -> Mapping[str, Room]:
    """The rooms of `paths`. A file outside of all rooms of `names` is counted for its top folder."""
    rooms: dict[str, Room] = defaultdict(Room)
    known = frozenset(names)
    for path in paths:
        if (name := room_of(path, known)) is None:
            continue
        room, source = rooms[name], (ROOT / path).read_text()
        if is_test(path):
            room.test_files += 1
            room.test_lines += len(source.splitlines())
        else:
            room.files += 1
            room.code += code_lines(source)
            room.lines += len(source.splitlines())
    return rooms


def code_lines(source: str) -> int:
    """The number of code lines: without blank lines, comments, and strings that are statements (docstrings)."""
    prose, strings = set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                prose.update(_lines(node))
            case ast.Constant(value=str()) | ast.JoinedStr():
                strings.update(_lines(node))
    lines = ((number, line.strip()) for number, line in enumerate(source.splitlines(), 1))
    code = (number for number, line in lines if line and (number in strings or not line.startswith("#")))
    return len(set(code) - prose)


def _lines(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
