"""The short form of `make chaos`: clients do not notice it when the server's own processes fail, hang or are slow."""

from collections.abc import Iterator

import faults
import outside
import processes
import pytest
from asks import KINDS, asks
from faults import Run
from scale import MANY_SLOTS, SHORT
from server_process import ServerProcess
from streams import StreamAnswer

SEED = 1


@pytest.fixture(scope="module")
def kept() -> Iterator[ServerProcess]:
    """A server without templates whose router several tests end, one after the other. Each time the launcher starts
    another."""
    flags = ("--standby", "off", "--max-concurrent-requests", "512", *MANY_SLOTS, *faults.stalling(SHORT))
    with SHORT.server(1, *flags) as server:
        yield server


@pytest.mark.parametrize(
    ("num_shard", "num_drains"), [(1, SHORT.num_drains), pytest.param(2, 0, marks=pytest.mark.slow)]
)
def test_no_stream_notices_that_shards_are_killed_from_outside(num_shard: int, num_drains: int) -> None:
    killed = outside.kill_from_outside(SHORT, num_shard, SHORT.num_kills[num_shard], num_drains, SEED)
    assert killed.failures() == []
    assert len(killed.kills) >= SHORT.num_kills[num_shard] and len(killed.kinds) == len(KINDS)


@pytest.fixture(scope="module")
def failing() -> Iterator[ServerProcess]:
    """A server whose first shard raises exceptions, and whose shards die of one token."""
    failpoints = f"{faults.raise_rules(SHORT, 1)};{faults.poison_rule()}"
    with SHORT.server(1, "--testing", environ={"FAILPOINTS": failpoints}) as server:
        yield server


def test_exceptions_in_steps_restart_nothing_and_no_stream_notices(
    failing: ServerProcess, one_shard: list[StreamAnswer]
) -> None:
    assert faults.raise_in_steps(Run(SHORT, expected=one_shard, kept=failing)).failures() == []


def test_a_request_that_kills_its_shards_ends_by_name_and_no_neighbour_notices(
    failing: ServerProcess, one_shard: list[StreamAnswer]
) -> None:
    assert faults.poison(Run(SHORT, expected=one_shard, kept=failing), alone=0).failures() == []


def test_no_stream_notices_a_killed_shard_without_a_template(kept: ServerProcess) -> None:
    assert processes.templates(kept.pid) == {} and not processes.shards(kept.pid)[0].name().startswith(processes.FORKED)
    faults.streams_though_a_shard_is_killed(kept, asks(8, 96))


def test_clients_that_never_read_lose_their_slots_and_cost_no_memory(kept: ServerProcess) -> None:
    assert faults.never_read(Run(SHORT, kept=kept)).failures() == []


def test_a_killed_router_is_started_again_and_leaves_nothing(kept: ServerProcess) -> None:
    assert faults.kill_router(Run(SHORT, kept=kept)).failures() == []


@pytest.mark.alone
def test_a_killed_launcher_leaves_no_process_file_or_memory() -> None:
    assert faults.kill_launcher(Run(SHORT, 2)).failures() == []


def test_clients_that_leave_at_once_free_their_slots_at_once(kept: ServerProcess) -> None:
    found = faults.all_leave_at_once(Run(SHORT, kept=kept))
    assert found.figures["slots free after s"] < 10  # a loose limit; `make chaos` measures the time


def test_a_router_that_is_stopped_is_replaced_and_the_shard_is_kept(kept: ServerProcess) -> None:
    assert faults.replace_stopped(Run(SHORT, kept=kept)).failures() == []


def test_sigterm_lets_all_streams_finish(kept: ServerProcess, one_shard: list[StreamAnswer]) -> None:
    """The last test of this server, which it ends."""
    assert faults.terminate(Run(SHORT, expected=one_shard, kept=kept)).failures() == []


def test_a_router_whose_event_loop_is_stuck_is_replaced_and_the_shard_is_kept() -> None:
    assert faults.replace_stuck(Run(SHORT)).failures() == []


@pytest.mark.alone
@pytest.mark.parametrize(("victim", "seconds"), [("router", 2.0), ("launcher", 10.0), ("machine", 5.0)])
def test_a_router_that_is_only_slow_is_kept_and_no_stream_notices(
    server: ServerProcess, one_shard: list[StreamAnswer], victim: str, seconds: float
) -> None:
    """`make chaos` takes the processor away for a minute."""
    run = Run(SHORT, expected=one_shard)
    assert faults.leave_server_alone(server, run, victim, seconds).failures() == []
