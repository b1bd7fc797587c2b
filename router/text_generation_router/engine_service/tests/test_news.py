"""The News stream over a real server, Health and Metrics."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.tests.fakes import FakeShards, dies_at, prompt
from text_generation_router.engine_service import news
from text_generation_router.engine_service.tests.raw_front import (
    PERMITS,
    EngineWorld,
    numbers,
    serve,
    served,
    submit,
)
from text_generation_router.fleet.cache_news import BlockHasher, CacheLog, HistoryHashes
from text_generation_router.scheduling.request import Share
from text_generation_router.wire.version import VERSION


class Reader:
    """Reads the news of an engine, and keeps the newest."""

    def __init__(self, world: EngineWorld, front_id: str, wants_cache: bool, every_ms: int) -> None:
        wanted = pb.NewsRequest(version=VERSION, front_id=front_id, wants_cache=wants_cache, every_ms=every_ms)
        self.call = world.stub.News(wanted)
        self.num_loads = 0
        self.load = pb.Load()
        self.caches: list[pb.Cache] = []
        self.cached: set[int] = set()

    async def read(self) -> None:
        message = await self.call.read()
        if message.HasField("load"):
            self.load = message.load
            self.num_loads += 1
        else:
            self.caches.append(message.cache)
            self.cached |= set(numbers(message.cache.added))
            self.cached -= set(numbers(message.cache.removed))

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            await self.read()


@asynccontextmanager
async def reading(
    world: EngineWorld, front_id: str = "front-1", wants_cache: bool = False, every_ms: int = 0
) -> AsyncIterator[Reader]:
    reader = Reader(world, front_id, wants_cache, every_ms)
    try:
        yield reader
    finally:
        reader.call.cancel()


def test_loads_tell_how_busy_the_engine_is_and_share_out_the_permits() -> None:
    async def use(world: EngineWorld) -> None:
        fronts = [await world.front(name) for name in ("a", "b")]
        async with reading(world, "a") as a, reading(world, "b") as b:
            for reader in (a, b):
                await reader.until(lambda reader=reader: reader.load.permits == PERMITS)
            await fronts[0].send(submit(range(6), prompt(0), 490))
            await a.until(lambda: a.load.running == 2)
            assert a.load.waiting == 4 and a.load.waiting_tokens >= 4 * 3 and 0 < a.load.free_slots < 5000
            assert a.load.is_ready and not a.load.is_draining
            assert (a.load.newest_index, b.load.newest_index) == (5, 0)
            await b.until(lambda: b.load.permits == PERMITS - 6)
            assert a.load.permits == PERMITS
            await fronts[0].send(*(pb.FrontMessage(cancel=pb.Cancel(index=index)) for index in range(6)))
            await b.until(lambda: b.load.permits == PERMITS)

    serve(use, lambda: FakeShards(capacity=5000), max_batch_size=2)


async def test_that_the_engine_drains_is_told_at_once(world: EngineWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "EVERY_S", 3600.0)  # what is not told at once is not told in time
    await world.front()
    async with reading(world) as reader:
        await reader.read()
        world.server.drain()
        await reader.until(lambda: reader.load.is_draining)


def test_lost_shards_are_told() -> None:
    async def use(world: EngineWorld) -> None:
        front = await world.front()
        async with reading(world) as reader:
            await reader.until(lambda: reader.load.is_ready)
            await front.send(submit([1], prompt(0), 4))
            await reader.until(lambda: not reader.load.is_ready)
            front.call.cancel()

    serve(use, dies_at(2))


def test_service_of_the_active_tenants_is_told_and_only_grows(monkeypatch: Any) -> None:
    monkeypatch.setattr(news, "ACTIVE_S", 0.3)

    async def use(world: EngineWorld) -> None:
        front = await world.front()
        async with reading(world) as reader:
            await front.send(submit([1], [1] * 10, 4, share=Share("a", "x")))
            await front.until_ended(1)
            await reader.until(lambda: reader.load.served and reader.load.served[0].tokens == 10 + 2 * 4)
            assert (reader.load.served[0].owner, reader.load.served[0].tenant) == ("a", "x")
            await reader.until(lambda: not reader.load.served)
            await front.send(submit([2], [2] * 5, 1, share=Share("a", "x")))
            await front.until_ended(2)
            await reader.until(lambda: reader.load.served and reader.load.served[0].tokens == 18 + 5 + 2)

    serve(use)


def serve_with_cache(use: Callable[[EngineWorld, BlockHasher], Awaitable[None]]) -> None:
    async def run() -> None:
        hasher = BlockHasher(b"k" * 16)
        world = EngineWorld(FakeShards)
        async with served(world, cache=CacheLog(hasher)):
            await asyncio.wait_for(use(world, hasher), timeout=60)

    asyncio.run(run())


def test_the_cache_is_told_as_a_whole_and_then_as_it_changes() -> None:
    async def use(world: EngineWorld, hasher: BlockHasher) -> None:
        def blocks(ids: list[int]) -> set[int]:
            return set(HistoryHashes(hasher, (), ids).hashes)

        first, second = [1] * 130, [2] * 70
        front = await world.front()
        await front.send(submit([1], first, 1))
        await front.until_ended(1)
        await world.front("other")
        async with reading(world, wants_cache=True) as early, reading(world, "other") as uninterested:
            await early.until(lambda: early.cached == blocks(first))
            assert early.caches[0].is_snapshot and len(blocks(first)) == 2
            await front.send(submit([2], second, 1))
            await front.until_ended(2)
            await early.until(lambda: early.cached == blocks(first) | blocks(second))
            assert not early.caches[-1].is_snapshot
            assert [cache.sequence for cache in early.caches] == list(range(1, len(early.caches) + 1))
            await world.front("third")
            async with reading(world, "third", wants_cache=True) as late:
                await late.until(lambda: late.cached == early.cached)
            await uninterested.read()
            assert not uninterested.caches

    serve_with_cache(use)


def test_a_front_that_wants_fewer_news_gets_all_that_is_new_with_them_and_at_once_what_must_not_wait() -> None:
    async def use(world: EngineWorld, hasher: BlockHasher) -> None:
        front = await world.front()
        for name in ("a", "b"):
            await world.front(name)
        async with reading(world, "a", True) as often, reading(world, "b", True, every_ms=10**9) as seldom:
            for number in range(3):
                await often.read()
                await front.send(submit([number + 1], [number + 1] * 130, 1))
                await front.until_ended(number + 1)
            await often.until(lambda: len(often.cached) == 6)
            await seldom.until(lambda: len(seldom.cached) == 6)
            while often.num_loads < 13:
                await often.read()
            await seldom.until(lambda: seldom.num_loads >= 3)
            assert seldom.num_loads < 8, "at most one in a second, and not one in four"
            world.server.drain()
            await seldom.until(lambda: seldom.load.is_draining)
            assert [cache.sequence for cache in seldom.caches] == list(range(1, len(seldom.caches) + 1))
            assert len(seldom.caches) <= seldom.num_loads

    serve_with_cache(use)


def test_the_cache_is_observed_only_while_a_front_wants_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(world: EngineWorld, hasher: BlockHasher) -> None:
        def is_observed() -> bool:
            return world.engine._scheduler.memory.cache._observer is not None

        front = await world.front()
        await front.send(submit([1], [1] * 130, 1))
        await front.until_ended(1)
        await world.front("other")
        async with reading(world, "other") as uninterested:
            await uninterested.read()
            assert not is_observed()
            async with reading(world, wants_cache=True) as reader:
                await reader.until(lambda: len(reader.cached) == 2)
                assert is_observed()
                cache = world.server._servicer.news._cache
            for _ in range(3):
                await uninterested.read()
            assert is_observed(), "the front may call again"
            monkeypatch.setattr(news, "OBSERVED_S", 0.0)
            while is_observed():
                await uninterested.read()
            assert cache is not None and not cache._blocks._of, "nodes of the cache are not kept"
            monkeypatch.setattr(news, "OBSERVED_S", 30.0)
            async with reading(world, wants_cache=True) as reader:
                await reader.until(lambda: len(reader.cached) == 2)

    serve_with_cache(use)


async def test_news_are_for_fronts_with_a_stream_and_each_front_has_one_call(world: EngineWorld) -> None:
    async with reading(world, "stranger") as stranger:
        assert await stranger.call.code() is grpc.StatusCode.FAILED_PRECONDITION
    await world.front("a")
    async with reading(world, "a") as older:
        await older.read()
        async with reading(world, "a") as newer:
            await newer.until(lambda: newer.load.is_ready)
            assert await older.call.code() is grpc.StatusCode.OK


async def test_health_and_metrics_are_the_engines_own(world: EngineWorld) -> None:
    assert (await world.stub.Health(pb.HealthRequest())).is_healthy
    await world.front()
    text = (await world.stub.Metrics(pb.MetricsRequest())).text.decode()
    assert "tgi_engine_fronts 1" in text and "tgi_batch_current_size" in text
