"""Checks of calls, of error handlers, and of the use of the environment in the product's Python code."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

MAX_POSITIONAL = 5
NO_END = "and neither raises it again, nor answers the caller, nor ends the process"
ELSEWHERE = " outside of a program's entry: read it in cli.py, and pass what is needed as an argument"
BROAD = ("Exception", "BaseException")
ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")


@dataclass(frozen=True, slots=True)
class RoomFinding:
    check: str  # the name of the check
    path: str
    line: int
    text: str  # what is wrong, and what to do

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True, slots=True)
class Checks:
    """The three checks.

    variadic: functions that take any number of positional arguments, so that these have no names.
    answers: functions that give an error to the caller or client that waits for a result, or that end the process.
    environment: patterns of the files that may use the environment: entries of programs.
    """

    variadic: frozenset[str]
    answers: frozenset[str]
    environment: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name())

    def findings(self, path: str, source: str) -> Iterator[RoomFinding]:
        """The findings in one file. `path` is relative to the repository."""
        tree = ast.parse(source)
        for name, check in self._by_name().items():
            for line, text in check(path, tree):
                yield RoomFinding(name, path, line, text)

    def _by_name(self) -> Mapping[str, Callable[[str, ast.Module], Iterator[tuple[int, str]]]]:
        return {"positional": self._positional, "broad": self._broad, "environment": self._environment}

    def _positional(self, path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            match node:
                case ast.Call() if len(node.args) > MAX_POSITIONAL and _name(node.func) not in self.variadic:
                    what = f"{_name(node.func)}(…) has {len(node.args)} positional arguments"
                    yield node.lineno, f"{what}, more than {MAX_POSITIONAL}: pass them by name"

    def _broad(self, path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            match node:
                case ast.Try() | ast.TryStar():
                    handlers = (handler for handler in node.handlers if _is_broad(handler.type))
                    found = (handler for handler in handlers if not self._has_end([*handler.body, *node.finalbody]))
                    text = f"handles every error, {NO_END}: handle the errors that are expected, by name"
                    yield from ((handler.lineno, text) for handler in found)
                case ast.Call(func=function) if _name(function) == "suppress" and any(map(_is_broad, node.args)):
                    yield node.lineno, "suppresses every error: suppress the errors that are expected, by name"

    def _environment(self, path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
        if any(PurePosixPath(path).match(pattern) for pattern in self.environment):
            return
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in ENVIRONMENT:
                    yield node.lineno, f"uses os.{name}{ELSEWHERE}"
                case ast.ImportFrom(module="os", names=names) if any(alias.name in ENVIRONMENT for alias in names):
                    yield node.lineno, f"imports the environment{ELSEWHERE}"

    def _has_end(self, body: Sequence[ast.stmt]) -> bool:
        for node in (found for statement in body for found in ast.walk(statement)):
            match node:
                case ast.Raise():
                    return True
                case ast.Call(func=function) if _name(function) in self.answers:
                    return True
        return False


def _is_broad(kind: ast.expr | None) -> bool:
    """Whether an error handler for `kind` handles every Exception, as one without a kind does."""
    match kind:
        case None:
            return True
        case ast.Tuple(elts=kinds):
            return any(map(_is_broad, kinds))
    return _name(kind) in BROAD


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ast.unparse(node)


def unexpected(
    findings: Sequence[RoomFinding], exceptions: Mapping[str, Mapping[str, int]], checks: Sequence[str]
) -> Iterator[str]:
    """What differs from the `exceptions`: for each check, the number of findings that a file may have."""
    found = Counter((finding.check, finding.path) for finding in findings)
    allowed = {(check, path): number for check in checks for path, number in exceptions.get(check, {}).items()}
    yield from (str(finding) for finding in findings if found[_key(finding)] > allowed.get(_key(finding), 0))
    for (check, path), number in allowed.items():
        if found[check, path] < number:
            yield f"exceptions.toml, {check}: {path} has {found[check, path]} of {number}: lower the number"


def _key(finding: RoomFinding) -> tuple[str, str]:
    return finding.check, finding.path
