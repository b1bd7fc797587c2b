"""A router that hangs is replaced; a router that is only slow is kept. `make chaos` also takes its processor away for a
minute.
"""

from collections.abc import Iterator
from functools import partial

import hung_router
import pytest
from scale import SHORT
from server_process import ServerProcess
from streams import StreamAnswer

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def spared() -> Iterator[ServerProcess]:
    """A server whose router is never replaced, so that several tests can harm it one after the other."""
    with SHORT.server(1) as server:
        yield server


def test_a_stopped_router_is_replaced_within_five_seconds_and_the_shard_is_kept() -> None:
    assert hung_router.replace_stopped(SHORT).failures() == []


def test_a_router_whose_event_loop_is_stuck_is_replaced() -> None:
    assert hung_router.replace_stuck(SHORT).failures() == []


def test_a_router_that_was_stopped_for_two_seconds_goes_on_and_no_stream_notices(
    spared: ServerProcess, one_shard: list[StreamAnswer]
) -> None:
    harm = partial(hung_router.stop_router_for, 2.0)
    assert hung_router.leave_server_alone(spared, SHORT, "2 s", harm, one_shard).failures() == []


def test_a_launcher_that_was_stopped_for_ten_seconds_replaces_no_process(
    spared: ServerProcess, one_shard: list[StreamAnswer]
) -> None:
    harm = partial(hung_router.stop_launcher_for, 10.0)
    assert hung_router.leave_server_alone(spared, SHORT, "10 s", harm, one_shard).failures() == []


def test_a_starved_router_goes_on(spared: ServerProcess, one_shard: list[StreamAnswer]) -> None:
    harm = partial(hung_router.starve_for, 5.0)
    assert hung_router.leave_server_alone(spared, SHORT, "5 s", harm, one_shard).failures() == []
