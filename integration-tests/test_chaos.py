"""The short form of `make chaos`: what is done to the server's own processes, no client notices."""

import departures
import kills
import pytest
import scenarios
from scale import SHORT
from streams import Heard

SEED = 1


@pytest.fixture(scope="module")
def one_shard() -> list[Heard]:
    """What every stream says when nothing happens."""
    return scenarios.undisturbed(SHORT, 1)


@pytest.fixture(scope="module")
def two_shards() -> list[Heard]:
    return scenarios.undisturbed(SHORT, 2)


def test_no_stream_notices_that_a_shard_is_killed_at_any_moment(one_shard: list[Heard]) -> None:
    assert scenarios.kill_shards(SHORT, 1, kills.EACH_ONCE, SEED, one_shard).failures() == []


def test_no_stream_notices_that_one_shard_of_two_is_killed(two_shards: list[Heard]) -> None:
    killed = scenarios.kill_shards(SHORT, 2, ["prefill", "decode"], SEED, two_shards)
    assert killed.comparison.is_equal and not killed.missed, killed.failures()


def test_a_stopped_shard_is_seen_and_no_stream_notices(two_shards: list[Heard]) -> None:
    assert scenarios.stop_shard(SHORT, 2, SEED, two_shards).failures() == []


def test_exceptions_in_steps_restart_nothing_and_no_stream_notices(one_shard: list[Heard]) -> None:
    assert scenarios.raise_in_steps(SHORT, 1, one_shard).failures() == []


def test_sigterm_lets_all_streams_finish(one_shard: list[Heard]) -> None:
    assert scenarios.terminate(SHORT, one_shard).failures() == []


def test_a_killed_router_is_started_again_and_leaves_nothing() -> None:
    assert departures.kill_router(SHORT, 1).failures() == []


def test_a_killed_launcher_leaves_no_process_file_or_memory() -> None:
    assert departures.kill_launcher(SHORT, 2).failures() == []


def test_clients_that_never_read_lose_their_slots_and_cost_no_memory() -> None:
    assert departures.never_read(SHORT).failures() == []


def test_clients_that_leave_at_once_free_their_slots_at_once() -> None:
    assert departures.all_leave_at_once(SHORT).freed_s < 10  # how soon is measured by `make chaos`
