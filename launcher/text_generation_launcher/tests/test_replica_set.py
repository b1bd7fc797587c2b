"""A set of replicas, which are pretended here: they are ready, fail and leave when a test says so."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from text_generation_common.errors import CommandError
from text_generation_common.link import ReplicaReport, ReplicaState
from text_generation_common.tasks import cancelled
from text_generation_launcher.errors import ScaleRefused, ShardFailed
from text_generation_launcher.replica_set import ReplicaSet, SetChanges, ends_server, plan_changes

PENDING, STARTING, READY, DRAINING, FAILED = ReplicaState
LIMIT_S = 30.0


class PretendedReplica:
    def __init__(self, number: int, on_change: Callable[[], None]) -> None:
        self.name = f"Replica {number}"
        self.endpoint: str | None = None
        self.is_ready = self.is_pending = False
        self.waits_for = ""
        self.was_asked_to_leave = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_change = on_change

    async def run(self) -> None:
        await self.over

    def stop(self) -> None:
        self.was_asked_to_leave = True

    def serve(self) -> None:
        self.endpoint, self.is_ready = f"unix:///{self.name}", True
        self._on_change()

    def wait_for_room(self) -> None:
        self.is_pending, self.waits_for = True, "the machines are full"
        self._on_change()

    def leave(self) -> None:
        self.over.set_result(None)

    def fail(self, error: CommandError) -> None:
        self.over.set_exception(error)


class Site:
    """A ReplicaSet that runs, its replicas in the order of their starts, and what it told."""

    def __init__(self, wanted: int, most: int = 8, retry_s: float = 0.0) -> None:
        self.made: list[PretendedReplica] = []
        self.told: list[ReplicaReport] = []
        self.set = ReplicaSet(self._make, wanted, most, ": the machine is small", retry_s)
        self.set.watch(self.told.append)
        self.running: asyncio.Task[None] | None = None

    def _make(self, number: int, on_change: Callable[[], None]) -> PretendedReplica:
        self.made.append(PretendedReplica(number, on_change))
        return self.made[-1]

    @property
    def states(self) -> list[ReplicaState]:
        return [replica.state for replica in self.set.report.replicas]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.001)


def on_site(scenario: Callable[[Site], Awaitable[None]], wanted: int, most: int = 8, retry_s: float = 0.0) -> None:
    async def run() -> None:
        site = Site(wanted, most, retry_s)
        site.running = asyncio.create_task(site.set.run())
        await site.until(lambda: len(site.made) == wanted)
        try:
            await scenario(site)
        finally:
            await cancelled(site.running)

    asyncio.run(run())


def test_replicas_are_added_and_taken_away_and_every_change_is_told() -> None:
    async def scenario(site: Site) -> None:
        for replica in site.made:
            replica.serve()
        await site.until(lambda: site.states == [READY, READY])
        site.set.scale(3)
        await site.until(lambda: site.states == [READY, READY, STARTING])
        site.set.scale(1)
        await site.until(lambda: site.states == [READY, DRAINING, DRAINING])
        first, second, third = site.made
        assert not first.was_asked_to_leave
        assert second.was_asked_to_leave
        assert third.was_asked_to_leave
        assert site.told[-1].endpoints == (first.endpoint, second.endpoint), "a draining engine keeps its streams"
        second.leave()
        third.leave()
        await site.until(lambda: site.told[-1].endpoints == (first.endpoint,))
        assert [told.wanted for told in site.told] == sorted((told.wanted for told in site.told), key=[2, 3, 1].index)

    on_site(scenario, wanted=2)


def test_a_new_replica_waits_for_the_place_of_a_draining_one() -> None:
    async def scenario(site: Site) -> None:
        site.set.scale(1)
        await site.until(lambda: DRAINING in site.states)
        site.set.scale(2)
        await asyncio.sleep(0.05)
        assert len(site.made) == 2
        next(replica for replica in site.made if replica.was_asked_to_leave).leave()
        await site.until(lambda: len(site.made) == 3)
        assert site.made[2].name == "Replica 1"

    on_site(scenario, wanted=2, most=2)


def test_a_failed_replica_is_started_again_while_another_one_serves() -> None:
    async def scenario(site: Site) -> None:
        for replica in site.made:
            replica.serve()
        await site.until(lambda: site.states == [READY, READY])
        site.made[1].fail(ShardFailed("its card is broken"))
        await site.until(lambda: len(site.made) == 3)
        failed = [replica for told in site.told for replica in told.replicas if replica.state is FAILED]
        assert {(replica.name, replica.reason, replica.endpoint) for replica in failed} == {
            ("Replica 1", "its card is broken", None)
        }
        site.made[2].serve()
        await site.until(lambda: site.states == [READY, READY])

    on_site(scenario, wanted=2)


def test_a_failed_replica_that_is_to_leave_leaves_before_its_next_start() -> None:
    async def scenario(site: Site) -> None:
        for replica in site.made:
            replica.serve()
        await site.until(lambda: site.states == [READY, READY])
        site.made[0].fail(ShardFailed("its card is broken"))
        await site.until(lambda: site.states == [FAILED, READY])
        site.set.scale(1)
        await site.until(lambda: site.states == [READY])
        assert not site.made[1].was_asked_to_leave

    on_site(scenario, wanted=2, retry_s=1000.0)


@pytest.mark.parametrize("serves_first", [True, False])
def test_the_last_failure_ends_the_server_and_so_does_one_before_any_replica_served(serves_first: bool) -> None:
    async def scenario(site: Site) -> None:
        if serves_first:
            site.made[0].serve()
            await site.until(lambda: site.set.has_served)
            site.made[0].fail(ShardFailed("first"))
            await site.until(lambda: FAILED in site.states)
        site.made[1].fail(ShardFailed("second"))
        assert site.running is not None
        with pytest.raises(ShardFailed, match="second"):
            await asyncio.wait_for(site.running, LIMIT_S)

    on_site(scenario, wanted=2, retry_s=1000.0)


def test_run_returns_when_all_have_left_after_a_stop_and_then_no_scale_is_taken() -> None:
    async def scenario(site: Site) -> None:
        site.set.stop()
        await site.until(lambda: all(replica.was_asked_to_leave for replica in site.made))
        with pytest.raises(ScaleRefused, match="stopping"):
            site.set.scale(3)
        for replica in site.made:
            replica.leave()
        assert site.running is not None
        await asyncio.wait_for(site.running, LIMIT_S)

    on_site(scenario, wanted=2)


@pytest.mark.parametrize(
    ("wanted", "why"), [(0, "cannot serve"), (9, "9 replicas are more than 8: the machine is small")]
)
def test_a_number_that_cannot_be_is_refused_and_changes_nothing(wanted: int, why: str) -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(ScaleRefused, match=why):
            site.set.scale(wanted)
        assert site.set.report.wanted == 2

    on_site(scenario, wanted=2)


def test_a_replica_without_room_is_told_with_the_reason_and_is_the_first_to_leave() -> None:
    async def scenario(site: Site) -> None:
        site.made[0].wait_for_room()
        site.made[1].serve()
        await site.until(lambda: [replica.state for replica in site.told[-1].replicas] == [PENDING, READY])
        assert site.told[-1].replicas[0].reason == "the machines are full"
        site.set.scale(1)
        await site.until(lambda: site.made[0].was_asked_to_leave)
        assert not site.made[1].was_asked_to_leave

    on_site(scenario, wanted=2)


def test_replicas_that_serve_least_leave_first() -> None:
    states = {0: FAILED, 1: READY, 2: STARTING, 3: READY}
    assert plan_changes(states, 3, 8) == SetChanges(drain=(0,))
    assert plan_changes(states, 1, 8) == SetChanges(drain=(0, 2, 3))
    assert plan_changes({0: STARTING, 1: FAILED, 2: READY, 3: PENDING}, 3, 8) == SetChanges(drain=(3,))
    assert plan_changes({0: DRAINING, 2: READY}, 3, 8) == SetChanges(start=(1, 3))
    assert plan_changes({0: DRAINING, 1: READY}, 2, 2) == SetChanges()


def test_a_failure_ends_the_server_unless_another_replica_goes_on() -> None:
    assert ends_server([READY], has_served=False)
    assert ends_server([], has_served=True)
    assert ends_server([FAILED, FAILED], has_served=True)
    assert not ends_server([FAILED, STARTING], has_served=True)
    assert not ends_server([READY], has_served=True)
