"""A small front that speaks the protocol by hand, and an engine with fake shards that serves it."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import numpy as np

from text_generation_common.cluster.endpoints import parse_endpoint
from text_generation_common.cluster.identity import Role
from text_generation_common.cluster.security import Security
from text_generation_proto import engine_pb2 as pb
from text_generation_proto import engine_pb2_grpc as pb_grpc
from text_generation_router.engine.tests.fakes import FakeShards, World
from text_generation_router.engine_service.identity import EngineIdentity
from text_generation_router.engine_service.server import EngineServer
from text_generation_router.scheduling.request import GenerationRequest, Past
from text_generation_router.wire.steps import runs_of
from text_generation_router.wire.submits import Submitted, submit_of
from text_generation_router.wire.version import VERSION

IDENTITY = EngineIdentity("engine-1", 3, b"digest")
PERMITS = 16


def hello(front_id: str = "front-1", version: int = VERSION) -> pb.FrontMessage:
    return pb.FrontMessage(hello=pb.Hello(version=version, front_id=front_id))


def submit(
    indexes: Sequence[int],
    ids: Sequence[int],
    count: int,
    past: Past = Past(),  # noqa: B008
    credits: int | None = None,
    group: str = "",
    **fields: Any,
) -> pb.FrontMessage:
    """A Submit message. `group`: name of the group, if the request is a suspect. `fields`: other fields of the
    request."""
    request = GenerationRequest(tuple(ids), count, **fields)
    return pb.FrontMessage(submit=submit_of([Submitted(index, request, past, credits, group) for index in indexes]))


class RawFront:
    """Reads everything the engine sends, and keeps it."""

    def __init__(self, stub: pb_grpc.EngineServiceStub) -> None:
        self.call = stub.Work()
        self.messages: list[pb.EngineMessage] = []
        self.ids: dict[int, list[int]] = {}
        self.ends: dict[int, pb.Ended] = {}
        self.accepted: list[int] = []
        self.refused: list[pb.Refused] = []
        self.epochs: list[pb.Epoch] = []
        self.begun: list[int] = []
        self.first_positions: dict[int, int] = {}
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    async def send(self, *messages: pb.FrontMessage) -> None:
        for message in messages:
            await self.call.write(message)

    async def connect(self, front_id: str = "front-1", version: int = VERSION) -> pb.Welcome:
        await self.send(hello(front_id, version))
        message = await self.call.read()
        self._reading = asyncio.create_task(self._read())
        return message.welcome

    async def _read(self) -> None:
        with suppress(grpc.aio.AioRpcError):  # `code` tells how the stream ended
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self._take(message)
                self._changed.set()

    def _take(self, message: pb.EngineMessage) -> None:
        self.messages.append(message)
        kind = message.WhichOneof("message")
        if kind == "accepted":
            self.accepted += message.accepted.indexes
        elif kind == "refused":
            self.refused.append(message.refused)
        elif kind == "begun":
            self.begun += message.begun.indexes
        elif kind == "epoch":
            self.epochs.append(message.epoch)
        elif kind == "ended":
            self._end(message.ended)
        elif kind == "tokens":
            for run in runs_of(message.tokens):
                known = self.ids.setdefault(run.wire_index, [])
                first = self.first_positions.setdefault(run.wire_index, run.position)
                assert run.position == first + len(known) and run.wire_index not in self.ends
                known += run.ids
            for ended in message.tokens.ended:
                self._end(ended)

    def _end(self, ended: pb.Ended) -> None:
        assert ended.index not in self.ends, "exactly one Ended for each request"
        assert ended.index in self.accepted
        self.ends[ended.index] = ended

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def until_ended(self, *indexes: int) -> list[pb.Ended]:
        await self.until(lambda: self.ends.keys() >= set(indexes))
        return [self.ends[index] for index in indexes]

    async def code(self) -> grpc.StatusCode:
        """The status with which the engine ends the stream."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        await self._reading
        return await self.call.code()


class EngineWorld(World):
    """An engine with fake shards behind a real server on a unix socket."""

    address = ""
    server: EngineServer
    stub: pb_grpc.EngineServiceStub

    async def front(self, front_id: str = "front-1") -> RawFront:
        front = RawFront(self.stub)
        await front.connect(front_id)
        return front

    def metric(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name) or 0.0

    def ends(self, why: str) -> float:
        """Number of Work streams that ended for this reason."""
        return self.metrics.registry.get_sample_value("tgi_engine_front_ends_total", {"why": why}) or 0.0

    async def until_idle(self) -> None:
        while not self.engine.is_idle:
            await asyncio.sleep(0.005)


def insecure() -> Security:
    return Security(Role.ENGINE, None, True, logging.getLogger(__name__))


@asynccontextmanager
async def served(world: EngineWorld, **more: Any) -> Any:
    with tempfile.TemporaryDirectory(prefix="tgi-") as folder:
        world.address = f"unix://{folder}/engine"
        await world.engine.start()
        world.server = EngineServer(world.engine, IDENTITY, world.metrics, PERMITS, insecure(), **more)
        await world.server.listen(parse_endpoint(world.address))
        async with grpc.aio.insecure_channel(world.address) as channel:
            world.stub = pb_grpc.EngineServiceStub(channel)
            try:
                yield
            finally:
                await world.server.close()
                await world.engine.close()


@asynccontextmanager
async def serving(*groups: Callable[[], FakeShards], **limits: int) -> AsyncIterator[EngineWorld]:
    """An engine that serves. If it still serves at the end, all slots must be free again."""
    world = EngineWorld(*groups, **limits)
    async with served(world):
        async with asyncio.timeout(60):
            yield world
        if world.engine._ended:
            return
        await asyncio.wait_for(world.until_idle(), timeout=60)
        scheduler = world.engine._scheduler
        async with asyncio.timeout(60):  # until all slots come back
            while scheduler.memory.num_held or scheduler.books() is not None:
                await asyncio.sleep(0.002)


def serve(use: Callable[[EngineWorld], Awaitable[None]], *groups: Callable[[], FakeShards], **limits: int) -> None:
    async def run() -> None:
        async with serving(*groups, **limits) as world:
            await use(world)

    asyncio.run(run())


def floats(data: bytes) -> list[float]:
    return np.frombuffer(data, "<f4").tolist()


def numbers(data: bytes) -> Iterator[int]:
    yield from np.frombuffer(data, "<u8").tolist()
