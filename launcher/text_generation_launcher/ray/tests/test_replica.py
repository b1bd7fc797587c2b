"""RayReplica: its endpoint, readiness and end follow from the statuses that a fake RayClient reports."""

import asyncio
from collections.abc import Callable

import pytest

from text_generation_launcher.errors import RayFailed
from text_generation_launcher.ray.replica import MAX_FAILURES, RayReplica
from text_generation_launcher.ray.values import RayPhase, RayStatus


class FakeRayClient:
    silent_s = 0.0

    def __init__(self) -> None:
        self.tell: Callable[[RayStatus | None], None] = lambda status: None
        self.forgotten: list[int] = []

    def want(self, number: int, tell: Callable[[RayStatus | None], None]) -> None:
        self.tell = tell

    def forget(self, number: int) -> None:
        self.forgotten.append(number)


def replica_of(client: FakeRayClient) -> RayReplica:
    return RayReplica(3, client, lambda: None)  # type: ignore[arg-type]


async def run_until(replica: RayReplica, *statuses: RayStatus | None) -> None:
    running = asyncio.create_task(replica.run())
    await asyncio.sleep(0)
    for status in statuses:
        replica._take(status)
    await asyncio.wait_for(running, 60)


def test_a_replica_without_room_is_pending_and_says_so_until_it_starts() -> None:
    replica = replica_of(FakeRayClient())
    assert not replica.is_pending
    replica._take(RayStatus("r", RayPhase.PENDING))
    assert (replica.is_pending, replica.is_ready) == (True, False)
    assert replica.waits_for == "no machine of the Ray cluster has room"
    replica._take(RayStatus("r", RayPhase.STARTING, why="its engine has ended: no memory"))
    assert (replica.is_pending, replica.waits_for) == (False, "its engine has ended: no memory")
    replica._take(RayStatus("r", RayPhase.SERVING, "h:1"))
    assert (replica.is_pending, replica.is_ready, replica.endpoint, replica.waits_for) == (False, True, "h:1", "")


def test_a_replica_that_never_serves_fails_and_is_forgotten() -> None:
    client = FakeRayClient()
    failed = RayStatus("r", RayPhase.STARTING, why="no memory", failures=MAX_FAILURES)
    with pytest.raises(RayFailed, match="no memory"):
        asyncio.run(run_until(replica_of(client), failed))
    assert client.forgotten == [3]


def test_a_replica_that_is_gone_ends_its_run() -> None:
    client = FakeRayClient()
    asyncio.run(run_until(replica_of(client), RayStatus("r", RayPhase.DRAINING), None))
    assert client.forgotten == [3]
