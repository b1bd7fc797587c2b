"""The short form of `make chaos`: clients do not notice it when the server's own processes fail."""

import departures
import mixed
import outside
import poison
import pytest
import scenarios
from scale import SHORT
from streams import StreamAnswer

SEED = 1


@pytest.fixture(scope="module")
def two_shards() -> list[StreamAnswer]:
    """As `one_shard`, with two shards."""
    return scenarios.undisturbed(SHORT, 2)


@pytest.mark.parametrize(
    ("num_shard", "num_drains"), [(1, SHORT.num_drains), pytest.param(2, 0, marks=pytest.mark.slow)]
)
def test_no_stream_notices_that_shards_are_killed_from_outside(num_shard: int, num_drains: int) -> None:
    killed = outside.kill_from_outside(SHORT, num_shard, SHORT.num_kills[num_shard], num_drains, SEED)
    assert killed.failures() == []
    assert len(killed.kills) >= SHORT.num_kills[num_shard] and len(killed.kinds) == len(mixed.KINDS)


def test_a_request_that_kills_its_shards_ends_by_name_and_no_neighbour_notices(one_shard: list[StreamAnswer]) -> None:
    assert poison.poison(SHORT, one_shard, alone=0).failures() == []


@pytest.mark.alone
def test_a_stopped_shard_is_seen_and_no_stream_notices(two_shards: list[StreamAnswer]) -> None:
    assert scenarios.stop_shard(SHORT, 2, SEED, two_shards).failures() == []


def test_exceptions_in_steps_restart_nothing_and_no_stream_notices(one_shard: list[StreamAnswer]) -> None:
    assert scenarios.raise_in_steps(SHORT, 1, one_shard).failures() == []


@pytest.mark.alone
def test_sigterm_lets_all_streams_finish(one_shard: list[StreamAnswer]) -> None:
    assert scenarios.terminate(SHORT, one_shard).failures() == []


def test_a_killed_router_is_started_again_and_leaves_nothing() -> None:
    assert departures.kill_router(SHORT, 1).failures() == []


@pytest.mark.alone
def test_a_killed_launcher_leaves_no_process_file_or_memory() -> None:
    assert departures.kill_launcher(SHORT, 2).failures() == []


@pytest.mark.alone
def test_clients_that_never_read_lose_their_slots_and_cost_no_memory() -> None:
    assert departures.never_read(SHORT).failures() == []


@pytest.mark.alone
def test_clients_that_leave_at_once_free_their_slots_at_once() -> None:
    assert departures.all_leave_at_once(SHORT).freed_s < 10  # a loose limit in seconds; `make chaos` measures the time
