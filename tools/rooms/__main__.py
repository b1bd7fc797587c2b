"""Prints what each room of the code uses of its budget; checks calls, error handlers and the use of the environment.

A room is a folder with a budget in `[tool.rooms.budgets]` of `pyproject.toml`: a maximum number of files, and of code
lines, or of whole lines. With --check, ends with status 1 if a room exceeds its budget, or a check finds more than
`exceptions.toml` allows.
"""

import argparse
import math
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from rooms.checks import Checks, unexpected
from rooms.counting import ROOT, Room, count, is_test, python_files

HERE = Path(__file__).parent
SPINE = HERE / "spine.txt"
Budgets = Mapping[str, Mapping[str, int]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rooms", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a budget is exceeded or a check finds something")
    parser.add_argument("--budgets", action="store_true", help="print budgets of 3 %% more than what is used today")
    options = parser.parse_args()
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["rooms"]
    paths, budgets = python_files(), table["budgets"]
    rooms = count(paths, budgets)
    if options.budgets:
        print("\n".join(_budget(name, rooms[name], budgets.get(name, {})) for name in sorted({*rooms, *budgets})))
        return 0
    print("\n".join(usage(rooms, budgets)))
    print("\n".join(spine(SPINE.read_text())))
    if not options.check:
        return 0
    checks = Checks(frozenset(table["variadic"]), frozenset(table["answers"]), tuple(table["environment"]))
    exceptions = tomllib.loads((HERE / "exceptions.toml").read_text())
    product = [path for path in paths if not is_test(path) and not path.startswith(tuple(table["unchecked"]))]
    findings = [finding for path in product for finding in checks.findings(path, (ROOT / path).read_text())]
    problems = [
        *exceeded(rooms, budgets),
        *unexpected(findings, exceptions, checks.names),
        *(
            f"{SPINE.name}: {path} is not a file: name the file that has its code"
            for path in missing(SPINE.read_text())
        ),
    ]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


def usage(rooms: Mapping[str, Room], budgets: Budgets) -> Iterator[str]:
    """A table: what each room uses, of what budget, and the tests beside it."""
    yield f"{'room':24}{'lines':>16}{'files':>12}{'tests, whole lines':>20}{'files':>7}"
    for name, room in sorted(rooms.items()):
        budget = budgets.get(name, {})
        used, most = (room.lines, budget["lines"]) if "lines" in budget else (room.code, budget.get("code", 0))
        lines, files = f"{used} of {most}", f"{room.files} of {budget.get('files', 0)}"
        yield f"{name:24}{lines:>16}{files:>12}{room.test_lines:>20}{room.test_files:>7}"
    code, tests = sum(room.code for room in rooms.values()), sum(room.test_lines for room in rooms.values())
    yield f"{code} code lines in {sum(room.files for room in rooms.values())} files; {tests} lines of tests"


def exceeded(rooms: Mapping[str, Room], budgets: Budgets) -> Iterator[str]:
    """What is beyond the budgets, and what to do."""
    advice = "make it smaller, or raise the budget in pyproject.toml, with a line in the commit that says why"
    for name, room in sorted(rooms.items()):
        if name not in budgets:
            yield f"{name}/ has {room.code} code lines and no budget: add one to [tool.rooms.budgets] in pyproject.toml"
            continue
        used = {"code": room.code, "lines": room.lines, "files": room.files}
        for kind, most in budgets[name].items():
            if used[kind] > most:
                unit = {"code": "code lines", "lines": "lines", "files": "files"}[kind]
                yield f"{name}/ has {used[kind]} {unit}, its budget is {most}: {advice}"
    yield from (f"{name}/ has a budget and no Python file: remove its budget" for name in budgets if name not in rooms)


def spine(text: str) -> Iterator[str]:
    """The whole lines of each part of the spine, a list of files with a heading for each part, and of all parts."""
    parts: dict[str, list[int]] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            parts[line.removeprefix("## ")] = sizes = []
        elif (path := ROOT / line).is_file():
            sizes.append(len(path.read_text().splitlines()))
    yield from (f"spine, {part}: {sum(sizes)} lines in {len(sizes)} files" for part, sizes in parts.items())
    yield f"spine: {sum(map(sum, parts.values()))} lines in {sum(map(len, parts.values()))} files"


def missing(text: str) -> list[str]:
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return [line for line in lines if not (ROOT / line).is_file()]


def _budget(name: str, room: Room, budget: Mapping[str, int]) -> str:
    kind, used = ("lines", room.lines) if "lines" in budget else ("code", room.code)
    return f'"{name}" = {{ {kind} = {math.ceil(used * 1.03)}, files = {math.ceil(room.files * 1.03)} }}'


if __name__ == "__main__":
    sys.exit(main())
