"""A router that hangs is replaced; a router that is only slow is kept. `make chaos` also takes its processor away for a
minute.
"""

from functools import partial

import hung_router
from scale import SHORT
from streams import StreamAnswer


def test_a_stopped_router_is_replaced_within_five_seconds_and_the_shard_is_kept() -> None:
    assert hung_router.replace_stopped(SHORT).failures() == []


def test_a_router_whose_event_loop_is_stuck_is_replaced() -> None:
    assert hung_router.replace_stuck(SHORT).failures() == []


def test_a_router_that_was_stopped_for_two_seconds_goes_on_and_no_stream_notices(one_shard: list[StreamAnswer]) -> None:
    harm = partial(hung_router.stop_router_for, 2.0)
    assert hung_router.leave_alone(SHORT, "2 s", harm, one_shard).failures() == []


def test_a_launcher_that_was_stopped_for_ten_seconds_replaces_no_process(one_shard: list[StreamAnswer]) -> None:
    harm = partial(hung_router.stop_launcher_for, 10.0)
    assert hung_router.leave_alone(SHORT, "10 s", harm, one_shard).failures() == []


def test_a_starved_router_goes_on(one_shard: list[StreamAnswer]) -> None:
    harm = partial(hung_router.starve_for, 5.0)
    assert hung_router.leave_alone(SHORT, "5 s", harm, one_shard).failures() == []
