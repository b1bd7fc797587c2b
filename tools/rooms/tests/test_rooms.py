"""Rooms count what they say, and each check finds what it is for."""

import pytest
from rooms.__main__ import SPINE, exceeded, missing, spine, usage
from rooms.checks import Checks, RoomFinding, unexpected
from rooms.counting import ROOT, Room, code_lines, room_of

CHECKS = Checks(frozenset({"chain"}), frozenset({"_exit", "exit", "set_exception"}), ("cli.py", "kernels/build.py"))
NAMES = ("router", "router/text", "launcher")

SOURCE = '''"""A module
of two lines."""

# A comment.
import os

TEXT = """one
# not a comment

three"""  # a comment behind code


class Thing:
    """A docstring."""

    size: int
    """A field's description."""
'''


def findings(source: str, path: str = "router/app.py") -> list[tuple[str, int]]:
    return [(finding.check, finding.line) for finding in CHECKS.findings(path, source)]


def handler(body: str, kind: str = "Exception") -> str:
    return f"try:\n    pass\nexcept {kind}:\n    {body}\n"


def test_blank_lines_comments_and_docstrings_do_not_count() -> None:
    assert code_lines(SOURCE) == len(["import", "TEXT", "# not a comment", "three", "class", "size"])


@pytest.mark.parametrize(
    ("path", "room"),
    [
        ("router/text_generation_router/text/calls/formats.py", "router/text"),
        ("router/text_generation_router/app.py", "router"),
        ("router/text_generation_router/unknown/file.py", "router"),
        ("launcher/tests/test_it.py", "launcher"),
        ("elsewhere/folder/file.py", "elsewhere"),
        ("hatch_build.py", None),
    ],
)
def test_a_file_is_in_the_closest_room(path: str, room: str | None) -> None:
    assert room_of(path, NAMES) == room


def test_a_room_beyond_its_budget_is_named_with_its_numbers() -> None:
    rooms = {"a": Room(files=2, code=11, lines=20), "b": Room(files=1, lines=30), "c": Room(files=1, code=5)}
    budgets = {"a": {"code": 10, "files": 2}, "b": {"lines": 30, "files": 0}, "d": {"code": 1, "files": 1}}
    a, b, c, d = exceeded(rooms, budgets)
    assert a.startswith("a/ has 11 code lines, its budget is 10: ") and "raise the budget" in a
    assert b.startswith("b/ has 1 files, its budget is 0: ")
    assert c.startswith("c/ has 5 code lines and no budget: ")
    assert d.startswith("d/ has a budget and no Python file: ")
    assert not list(exceeded({"a": Room(files=2, code=10)}, {"a": {"code": 10, "files": 2}}))
    assert "11 of 10" in "\n".join(usage(rooms, budgets))


def test_more_than_five_positional_arguments_are_found() -> None:
    source = "f(1, 2, 3, 4, 5)\nf(1, 2, 3, 4, 5, 6)\nf(1, 2, 3, 4, 5, last=6)\nitertools.chain(1, 2, 3, 4, 5, 6)\n"
    assert findings(source) == [("positional", 2)]


@pytest.mark.parametrize(
    "kind", ["Exception", "BaseException", "(ValueError, Exception)", "builtins.Exception as error"]
)
def test_a_handler_of_every_error_that_only_logs_is_found(kind: str) -> None:
    assert findings(handler("log()", kind)) == [("broad", 3)]


def test_a_bare_handler_and_a_suppression_of_every_error_are_found() -> None:
    assert findings("try:\n    pass\nexcept:\n    pass\n") == [("broad", 3)]
    assert findings("with contextlib.suppress(Exception):\n    pass\n") == [("broad", 1)]


@pytest.mark.parametrize("body", ["raise", "raise OtherError from None", "sys.exit(1)", "future.set_exception(error)"])
def test_a_handler_of_every_error_may_raise_answer_and_end_the_process(body: str) -> None:
    assert findings(handler(body)) == []


def test_a_block_whose_end_ends_the_process_may_handle_every_error() -> None:
    assert findings(handler("log()") + "finally:\n    os._exit(1)\n") == []


def test_a_handler_of_an_expected_error_may_do_anything() -> None:
    assert findings(handler("pass", "OSError")) == findings(handler("pass", "(OSError, ValueError)")) == []


@pytest.mark.parametrize("source", ["os.environ['A']", "os.getenv('A')", "from os import environ, path"])
def test_the_environment_is_for_entries_only(source: str) -> None:
    assert findings(source) == [("environment", 1)]
    assert findings(source, "server/cli.py") == findings(source, "server/kernels/build.py") == []
    assert findings(source, "router/build.py") == [("environment", 1)]


def test_exceptions_allow_as_many_findings_as_there_are() -> None:
    found = [RoomFinding("broad", "a.py", line, "wrong") for line in (3, 8)]
    assert not list(unexpected(found, {"broad": {"a.py": 2}}, CHECKS.names))
    assert list(unexpected(found, {"broad": {"a.py": 1}}, CHECKS.names)) == ["a.py:3: wrong", "a.py:8: wrong"]
    assert "lower the number" in next(unexpected(found, {"broad": {"a.py": 3}}, CHECKS.names))
    assert "lower the number" in next(unexpected([], {"environment": {"gone.py": 1}}, CHECKS.names))


def test_the_spine_counts_whole_lines_of_files_that_are_there() -> None:
    size = len((ROOT / "Makefile").read_text().splitlines())
    assert list(spine("# Files.\n\n## One\nMakefile\n")) == [
        f"spine, One: {size} lines in 1 files",
        f"spine: {size} lines in 1 files",
    ]
    assert missing("# Files.\n\n## One\nMakefile\nnowhere.py\n") == ["nowhere.py"]
    assert missing(SPINE.read_text()) == []
