"""Hostile requests: no answer is a 5xx or a traceback, and no process of the server restarts."""

from collections.abc import Iterator

import attacks
import hostile
import mutants
import pytest
from scale import SHORT
from server_process import ServerProcess


@pytest.fixture(scope="module")
def target() -> Iterator[ServerProcess]:
    # At most 64 tokens, so that valid requests among the hostile ones end soon.
    with SHORT.server(1, "--max-total-tokens", "64") as server:
        yield server


def test_a_thousand_hostile_bodies_are_refused_or_answered(target: ServerProcess) -> None:
    attacked = attacks.throw_bodies(target, hostile.bodies(attacks.SEED), on_every_route=False)
    assert attacked.failures() == [] and attacked.sent >= 1000


def test_large_bodies_are_refused_or_answered(target: ServerProcess) -> None:
    attacked = attacks.throw_bodies(target, hostile.large_bodies(), on_every_route=False)
    assert attacked.failures() == [] and attacked.sent >= 50


def test_a_thousand_changed_bodies_are_refused_or_answered_without_a_server_error(target: ServerProcess) -> None:
    attacked = mutants.throw_mutants(target, attacks.SEED, 1000)
    assert attacked.failures() == [] and attacked.sent == 1000
    assert min(attacked.statuses.get(200, 0), attacked.statuses.get(400, 0), attacked.statuses.get(422, 0)) >= 50
    assert "Traceback" not in target.log()


def test_whatever_the_document_allows_or_forbids_is_answered(target: ServerProcess) -> None:
    attacked = attacks.fuzz(target, 4)  # the router's own tests have more: openapi/tests/test_cases.py
    assert attacked.failures() == []
    assert attacked.statuses.get(200) and attacked.statuses.get(422), attacked.statuses
