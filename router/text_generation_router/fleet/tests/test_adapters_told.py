"""Adapters that come while engines run: each engine is told of them before its first request, and an engine that does
not take them gets none of their requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from text_generation_common.cluster.endpoints import UnixEndpoint
from text_generation_common.cluster.identity import Role
from text_generation_common.cluster.security import Security
from text_generation_common.flags.model import MAX_ADAPTERS
from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.local import OWN_NAME, TAKES_NONE
from text_generation_router.engine.tests.fakes import INFO, FakeShards, Listener, World, expected_tokens, prompt
from text_generation_router.errors import Refusal, RefusedError
from text_generation_router.fleet import connection
from text_generation_router.fleet.engine import RemoteEngine
from text_generation_router.fleet.tests.fake_service import FakeService
from text_generation_router.fleet.tests.test_real_engines import LOGGER, Replica
from text_generation_router.scheduling.adapter_slots import AdapterRoom
from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.step import AdapterStep, Step, StepAnswer

A, B = "a" * 64, "b" * 64
MANY = 10**6


class OpenShards(FakeShards):
    """Shards that take any adapter but B, into one slot."""

    info = replace(INFO, adapter_room=AdapterRoom((), 1, 4, grows=True))

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[str, str]] = []

    async def prepare_adapter(self, digest: str, folder: str = "") -> str:
        self.read.append((digest, folder))
        return "the rank is 9" if digest == B else ""

    def _compute(self, step: Step) -> StepAnswer | None:
        return StepAnswer(0) if isinstance(step, AdapterStep) else super()._compute(step)


@asynccontextmanager
async def fronted(*endpoints: UnixEndpoint) -> AsyncIterator[RemoteEngine]:
    front = RemoteEngine(endpoints, Security(Role.FRONT, None, insecure=False, logger=LOGGER))
    try:
        await front.start()
        await until(lambda: front.num_engines == len(endpoints))
        yield front
    finally:
        await front.close()


async def until(holds: object) -> None:
    async with asyncio.timeout(60):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.005)


def ask(engine: RemoteEngine, number: int, adapter: str, count: int = 5) -> Listener:
    listener = Listener()
    request = GenerationRequest(tuple(prompt(number)), count, adapter=adapter)
    (listener.index,) = engine.submit_all([request], [listener], MANY).indexes
    return listener


async def test_all_engines_read_an_adapter_and_then_have_requests_of_it(tmp_path: Path) -> None:
    replicas = [Replica(tmp_path / name, 1, OpenShards) for name in "ab"]
    for replica in replicas:
        await replica.start()
    async with fronted(*(replica.endpoint for replica in replicas)) as front:
        with pytest.raises(RefusedError) as refused:
            ask(front, 0, A)
        assert refused.value.reason is Refusal.NO_ADAPTER
        refusals = await front.load_adapter(B, "/b")
        assert set(refusals.values()) == {"the rank is 9"} and len(refusals) == 2
        assert await front.load_adapter(A, "/a") == {}
        await front.learn_adapters({A: "/a"})
        listeners = [ask(front, number, A) for number in range(4)]
        assert [await each.all_ids() for each in listeners] == [expected_tokens(prompt(n), 5) for n in range(4)]
        shards = [replica.world.groups.made[-1] for replica in replicas]
        assert all(isinstance(each, OpenShards) and (A, "/a") in each.read for each in shards)
        assert await front.num_with_adapter(A) == 0
        # An engine that comes back is told before its first request, although no front asks it to read the files.
        first = replicas[0]
        await first.die()
        await until(lambda: front.num_engines == 1)
        again = Replica(Path(first.endpoint.path), 2, OpenShards)
        await again.start()
        await until(lambda: front.num_engines == 2)
        assert all(A in view.facts.snapshot.model.adapters for view in front._fleet.engines.values())
        await replicas[1].stop()
        await until(lambda: front.num_engines == 1)
        assert await ask(front, 5, A).all_ids() == expected_tokens(prompt(5), 5)
        await again.stop()
    await first.world.engine.close()


async def test_an_engine_of_an_older_build_or_without_room_gets_no_request_of_a_new_adapter(tmp_path: Path) -> None:
    closed = Replica(tmp_path / "closed", 1, FakeShards)
    await closed.start()
    async with FakeService(str(tmp_path / "old")) as old:
        async with fronted(closed.endpoint, UnixEndpoint(old.path)) as front:
            refusals = await front.load_adapter(A, "/a")
            assert sorted(refusals.values()) == [TAKES_NONE, "its version loads no adapters while it runs"]
            await front.learn_adapters({A: "/a"})
            with pytest.raises(RefusedError):
                ask(front, 0, A)
            assert await ask(front, 1, "").all_ids() == expected_tokens(prompt(1), 5)
        async with fronted(UnixEndpoint(old.path)) as front:
            front._adapters[A] = "/a"  # told to an engine that is connected
            await old.die()
            await until(lambda: front.num_engines == 0)
            async with FakeService(old.path, term=2):
                await until(lambda: front.num_engines == 1)
                with pytest.raises(RefusedError):
                    ask(front, 2, A)
    await closed.stop()


class ForgetfulService(FakeService):
    """An engine that does not answer some calls about adapters, and lives."""

    failures = 0
    told = 0

    async def Adapters(self, request: pb.AdaptersRequest, context: Any) -> pb.AdaptersResponse:
        self.told += bool(request.adapters)
        if self.failures:
            self.failures -= 1
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "busy")
        return pb.AdaptersResponse()


async def test_an_engine_that_does_not_answer_is_told_again_then_left_and_unloading_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "TELL_AGAIN_S", 0.01)
    async with ForgetfulService(str(tmp_path / "e")) as engine, fronted(UnixEndpoint(engine.path)) as front:
        engine.failures = connection.TELL_TRIES - 1
        await front.learn_adapters({A: "/a"})
        assert front.num_engines == 1 and not front._fleet.lacks_adapter(A)
        engine.failures = 2
        assert [await front.num_with_adapter(A) for _ in range(3)] == [1, 1, 0]
        assert [r.message for r in caplog.records if "requests of an adapter: it did not answer: busy" in r.message]
        engine.failures = connection.TELL_TRIES
        await front.learn_adapters({B: "/b"})
        await until(lambda: len(engine.hellos) == 2 and front.num_engines == 1)
        assert not front._fleet.lacks_adapter(B), "it was told when it was connected again"


async def test_adapters_that_are_served_no_more_and_have_requests_count_beside_the_thousand(tmp_path: Path) -> None:
    replica = Replica(tmp_path / "a", 1, OpenShards)
    await replica.start()
    async with fronted(replica.endpoint) as front:
        front._adapters |= {f"{number:064x}": "/old" for number in range(MAX_ADAPTERS)}
        assert await front.load_adapter(A, "/a") == {}
        await front.connect([])
        front._adapters[B] = "/b"
        await front.connect([replica.endpoint])
        await until(lambda: front.num_engines == 1)
    await replica.stop()
    await replica.world.engine.close()


async def test_an_engine_keeps_what_it_was_told_when_its_shards_are_lost() -> None:
    world = World(OpenShards, OpenShards)
    await world.engine.start()
    assert await world.engine.load_adapter(B, "/b") == {OWN_NAME: "the rank is 9"}
    assert await world.engine.load_adapter(A, "/a") == {} and A not in world.engine.snapshot().model.adapters
    await world.engine.learn_adapters({A: "/a"})
    world.groups.made[0].lost.set_result("killed")
    await until(lambda: len(world.groups.made) == 2 and world.engine.load().is_ready)
    assert world.engine.snapshot().model.adapters == {A}
    listener = Listener()
    listener.index = world.engine.submit(GenerationRequest(tuple(prompt(1)), 5, adapter=A), listener, MANY)
    assert await world.engine.num_with_adapter(A) == 1
    assert await listener.all_ids() == expected_tokens(prompt(1), 5)
    shards = world.groups.made[1]
    assert isinstance(shards, OpenShards) and shards.read == [(A, "/a")]
    assert await world.engine.num_with_adapter(A) == 0
    await world.engine.close()
