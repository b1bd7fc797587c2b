"""docs/troubleshooting.md has a line for each class of the error trees. The launcher's tests of bad starts demand a
line for each message of a start that fails."""

import re
from collections.abc import Iterator

import pytest
from manifests import REPOSITORY

import text_generation.errors as client_errors
from text_generation_common.errors import CommandError, ShardError
from text_generation_launcher import errors as launcher_errors
from text_generation_router import errors as router_errors
from text_generation_router.errors import InferenceError, ShardsError, StartError
from text_generation_server import errors as server_errors

PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
LINES = [line for line in PAGE.splitlines() if line.startswith("| `")]
TREES = (launcher_errors, router_errors, server_errors, client_errors)  # modules whose classes are drawn in trees
NAMED = (CommandError, ShardError, ShardsError, StartError, client_errors.TextGenerationError)


def below(root: type) -> Iterator[type]:
    for child in root.__subclasses__():
        yield child
        yield from below(child)


def first_cell(line: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", line.split("|")[1]))


def drawn() -> Iterator[type]:
    """The classes of all trees; other files' subclasses of them, of tests for example, are not drawn."""
    for root in NAMED:
        inner = [child for child in below(root) if "tests" not in child.__module__]
        yield from (child for child in inner if child.__module__.endswith("errors"))
    yield ShardsError
    yield StartError


@pytest.mark.parametrize("error", sorted(set(drawn()), key=lambda error: error.__name__), ids=lambda e: e.__name__)
def test_an_error_of_a_command_a_shard_or_the_client_has_its_line(error: type) -> None:
    assert any(error.__name__ in first_cell(line) for line in LINES)


REFUSALS = sorted(
    {child for child in below(InferenceError) if hasattr(child, "error_type") and hasattr(child, "status")},
    key=lambda error: error.__name__,
)


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.__name__)
def test_a_refused_request_has_its_line_with_the_status(error: type[InferenceError]) -> None:
    [line] = [line for line in LINES if error.error_type in first_cell(line) and line.split("|")[2].strip().isdigit()]
    assert int(line.split("|")[2]) == error.status
    assert error.code in (None, error.error_type) or f"`{error.code}`" in line


def test_every_name_in_the_tables_of_errors_is_one() -> None:
    known = {error.error_type for error in REFUSALS} | {error.__name__ for error in drawn()}
    section = PAGE.partition("## A server has ended")[2].partition("## It runs, but")[0]
    named = set().union(*(first_cell(line) for line in section.splitlines() if line.startswith("| `")))
    assert named - known == {"UsageError", "error_type"}
