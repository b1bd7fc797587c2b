"""RemoteEngine and several real engines with fake shards, each behind its service on a unix socket."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from text_generation_common.cluster.endpoints import TcpEndpoint, UnixEndpoint
from text_generation_common.cluster.identity import Identity, Role
from text_generation_common.cluster.issuing import Authority
from text_generation_common.cluster.security import Security
from text_generation_common.errors import CredentialsError
from text_generation_router.engine.tests.fakes import FakeShards, Listener, World, expected_tokens, prompt
from text_generation_router.engine_service.identity import EngineIdentity
from text_generation_router.engine_service.server import EngineServer
from text_generation_router.fleet.cache_news import BLOCK_TOKENS, BlockHasher, CacheLog
from text_generation_router.fleet.engine import RemoteEngine
from text_generation_router.fleet.placement import BestScore, Placement
from text_generation_router.scheduling.request import EndReason, GenerationRequest

LOGGER = logging.getLogger("test")
KEY = bytes(range(32))


class Replica:
    """The parts of one engine process, inside the test's process."""

    def __init__(self, path: Path, term: int, shards: Callable[[], FakeShards] = FakeShards, **limits: int) -> None:
        self.world = World(shards, **limits)
        self.endpoint = UnixEndpoint(str(path))
        self.term = term

    async def start(self) -> None:
        await self.world.engine.start()
        security = Security(Role.ENGINE, None, insecure=False, logger=LOGGER)
        identity = EngineIdentity(f"{self.endpoint.path} {self.term}", self.term, b"digest")
        cache = CacheLog(BlockHasher(KEY))
        self.server = EngineServer(self.world.engine, identity, self.world.metrics, 16, security, cache)
        await self.server.listen(self.endpoint)

    async def stop(self) -> None:
        await self.server.close()
        await self.world.engine.close()

    async def die(self) -> None:
        """Ends the streams without a message, as when the engine's process is killed."""
        await self.server._server.stop(None)

    @property
    def made(self) -> int:
        """Number of requests that the shards have worked on."""
        return len({index for step in self.world.forward_steps for index in step.request_ids})


class Deployment:
    def __init__(self, folder: Path, count: int, placement: Placement | None = None, **limits: int) -> None:
        self.answers: list[asyncio.Future[None]] = []
        self.replicas = [Replica(folder / str(number), 1, **limits) for number in range(count)]
        client = Security(Role.FRONT, None, insecure=False, logger=LOGGER)
        self.front = RemoteEngine([replica.endpoint for replica in self.replicas], client, placement)

    async def start(self) -> None:
        for replica in self.replicas:
            await replica.start()
        await self.front.start()
        while len(self.front._fleet.engines) < len(self.replicas):
            await asyncio.sleep(0.002)

    async def stop(self) -> None:
        await self.front.close()
        for replica in self.replicas:
            await replica.stop()

    def ask(self, number: int, count: int) -> Listener:
        listener = Listener()
        request = GenerationRequest(tuple(prompt(number)), count)
        submission = self.front.submit_all([request], [listener], 10**9)
        [listener.index] = submission.indexes
        assert submission.answer is not None
        self.answers.append(submission.answer)
        return listener


@asynccontextmanager
async def deployed(
    folder: Path, count: int = 2, placement: Placement | None = None, **limits: int
) -> AsyncIterator[Deployment]:
    deployment = Deployment(folder, count, placement, **limits)
    try:
        await deployment.start()
        async with asyncio.timeout(60):
            yield deployment
        assert deployment.front.counts.broken_rules == 0
    finally:
        await deployment.stop()


async def texts_are_right(asked: list[Listener], count: int) -> None:
    for number, listener in enumerate(asked):
        assert await listener.all_ids() == expected_tokens(prompt(number), count)


async def test_texts_go_on_unbroken_when_one_of_two_engines_dies(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment:
        asked = [deployment.ask(number, 40) for number in range(8)]
        for listener in asked:
            await listener.until_tokens(3)
        dead = deployment.replicas[0]
        assert all(replica.made for replica in deployment.replicas)
        await dead.die()
        await texts_are_right(asked, 40)
        assert deployment.front.counts.lost_engines == 1 and deployment.front.counts.resumes == dead.made


async def test_texts_go_on_unbroken_when_one_of_two_engines_is_closed_and_none_is_a_suspect(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment:
        asked = [deployment.ask(number, 40) for number in range(8)]
        for listener in asked:
            await listener.until_tokens(3)
        await deployment.replicas[0].stop()
        await texts_are_right(asked, 40)
        counts = deployment.front.counts
        assert counts.moves == deployment.replicas[0].made and not counts.resumes


async def test_texts_go_on_unbroken_when_the_only_engine_dies_and_another_comes(tmp_path: Path) -> None:
    async with deployed(tmp_path, 1) as deployment:
        asked = [deployment.ask(number, 40) for number in range(6)]
        for listener in asked:
            await listener.until_tokens(3)
        await deployment.replicas[0].stop()
        waiting = deployment.ask(6, 40)
        deployment.replicas[0] = Replica(tmp_path / "0", 2)
        await deployment.replicas[0].start()
        await texts_are_right([*asked, waiting], 40)


async def test_requests_leave_an_engine_that_drains(tmp_path: Path) -> None:
    async with deployed(tmp_path, max_rows=1, max_batch_size=1) as deployment:
        first, second = deployment.replicas
        asked = [deployment.ask(number, 60) for number in range(8)]
        await asyncio.gather(*deployment.answers)
        while not first.made:
            await asyncio.sleep(0.002)
        first.server.drain()
        await texts_are_right(asked, 60)
        assert first.made == 1 and second.made >= 7 and deployment.front.counts.moves > 0
        assert deployment.front.counts.lost_engines == 0


async def test_running_requests_leave_an_engine_that_drains_until_it_has_none(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment:
        first, second = deployment.replicas
        asked = [deployment.ask(number, 400) for number in range(6)]
        for listener in asked:
            await listener.until_tokens(3)
        assert first.made and second.made
        first.server.drain()
        while not first.world.engine.is_idle:
            await asyncio.sleep(0.002)
        assert any(listener.end is None for listener in asked), "the engine has given its requests back"
        await first.stop()
        await texts_are_right(asked, 400)
        assert 0 < deployment.front.counts.moves <= first.made and not deployment.front.counts.resumes


def certificates(folder: Path, authority: Authority, role: Role) -> Path:
    issued = authority.issue(Identity("tgi", role), "127.0.0.1", 30, None)
    folder.mkdir()
    files = (("ca.crt", authority.issued.certificate), ("tls.crt", issued.certificate), ("tls.key", issued.key))
    for name, data in files:
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
    return folder


def test_over_tcp_an_engine_is_used_only_if_its_certificate_is_of_the_deployment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def use() -> None:
        authorities = {"good": Authority.made("tgi"), "foreign": Authority.made("tgi")}
        worlds = {name: World() for name in authorities}
        servers, endpoints = [], []
        for name, authority in authorities.items():
            world, folder = worlds[name], certificates(tmp_path / name, authority, Role.ENGINE)
            await world.engine.start()
            security = Security(Role.ENGINE, folder, insecure=False, logger=LOGGER)
            servers.append(EngineServer(world.engine, EngineIdentity(name, 1, b"digest"), world.metrics, 16, security))
            endpoints.append(TcpEndpoint("127.0.0.1", await servers[-1].listen(TcpEndpoint("127.0.0.1", 0))))
        own = certificates(tmp_path / "front", authorities["good"], Role.FRONT)
        front = RemoteEngine(reversed(endpoints), Security(Role.FRONT, own, insecure=False, logger=LOGGER))
        await front.start()
        listener = Listener()
        front.submit_all([GenerationRequest((1, 2), 9)], [listener], 100)
        assert await listener.all_ids() == expected_tokens([1, 2], 9)

        def told() -> list[str]:
            lines = [record.getMessage() for record in caplog.records]
            return [line for line in lines if "cannot be reached" in line and endpoints[1].target in line]

        while not told():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # several tries to connect, and one line
        [foreign] = told()
        assert "cannot be reached: the peer's certificate is refused: unable to get local issuer" in foreign
        assert len(front._fleet.engines) == 1 and not worlds["foreign"].forward_steps
        await front.close()
        for server, world in zip(servers, worlds.values(), strict=True):
            await server.close()
            await world.engine.close()

    asyncio.run(asyncio.wait_for(use(), 60))


async def test_tcp_without_certificates_is_refused(tmp_path: Path) -> None:
    front = RemoteEngine([TcpEndpoint("127.0.0.1", 1)], Security(Role.FRONT, None, insecure=False, logger=LOGGER))
    with pytest.raises(CredentialsError):
        await front.start()
    await front.close()


async def test_a_front_that_leaves_frees_its_rows(tmp_path: Path) -> None:
    async with deployed(tmp_path, 1) as deployment:
        listener = deployment.ask(0, 400)
        await listener.until_tokens(2)
        await deployment.front.close()
        assert listener.end is not None and listener.end.reason is EndReason.CLOSED
        scheduler = deployment.replicas[0].world.engine._scheduler
        async with asyncio.timeout(60):
            while not scheduler.is_idle:
                await asyncio.sleep(0.01)


def test_a_chat_s_next_turn_goes_where_its_last_one_was_computed_from_any_front(tmp_path: Path) -> None:
    """Chats of 3 and more blocks on 3 engines. The turns of a chat come from 2 fronts that exchange no messages."""
    turns = {number: [number + 1] * 200 for number in range(6)}

    async def use() -> None:
        replicas = [Replica(tmp_path / str(number), 1, lambda: FakeShards(capacity=20_000)) for number in range(3)]
        for replica in replicas:
            await replica.start()
        placements = [BestScore(KEY, turn) for turn in range(2)]
        endpoints = [replica.endpoint for replica in replicas]
        fronts = [
            RemoteEngine(endpoints, Security(Role.FRONT, None, insecure=False, logger=LOGGER), placement)
            for placement in placements
        ]
        try:
            for front in fronts:
                await front.start()
            for front in (0, 1, 0):
                await until_known(replicas, placements)
                before = {number: engine_of(replicas, ids) for number, ids in turns.items()}
                for number, ids in list(turns.items()):
                    listener = Listener()
                    fronts[front].submit_all([GenerationRequest(tuple(ids), 70)], [listener], 10**9)
                    assert await listener.all_ids() == expected_tokens(ids, 70)
                    assert listener.given[0].first is not None
                    cached = listener.given[0].first.cached_tokens
                    assert cached >= (len(ids) - 70 if before[number] is not None else 0)
                    turns[number] = [*ids, *listener.ids, 9]
                    assert before[number] in (None, engine_of(replicas, turns[number][:-2]))
            assert len({engine_of(replicas, ids) for ids in turns.values()}) == 3, "idle engines are used in turn"
            assert all(front.counts.news_gaps == 0 for front in fronts)
            assert [cache_is_observed(replica) for replica in replicas] == [True] * 3
        finally:
            for front in fronts:
                await front.close()
            for replica in replicas:
                await replica.stop()

    asyncio.run(asyncio.wait_for(use(), 60))


def engine_of(replicas: list[Replica], ids: list[int]) -> int | None:
    """The engine that has most of a text in its cache; None: no engine has a whole block of it."""
    found = np.array(ids, dtype=np.int32)
    matched = [replica.world.engine._scheduler.memory.cache.match((), found) for replica in replicas]
    return matched.index(max(matched)) if max(matched) >= BLOCK_TOKENS else None


def cache_is_observed(replica: Replica) -> bool:
    return replica.world.engine._scheduler.memory.cache._observer is not None


async def until_known(replicas: list[Replica], placements: list[BestScore]) -> None:
    """Waits until each front knows what each engine has cached."""
    async with asyncio.timeout(30):
        while not all(map(cache_is_observed, replicas)):
            await asyncio.sleep(0.01)
        cached = [set(replica.server._servicer.news._cache._blocks.hashes()) for replica in replicas]  # type: ignore[union-attr]
        while not all(cached == [known_blocks(placement, engine) for engine in range(3)] for placement in placements):
            await asyncio.sleep(0.01)


def known_blocks(placement: BestScore, engine: int) -> set[int]:
    return {block for block, engines in placement.index._engines.items() if engines >> engine & 1}


async def test_an_engine_alone_is_never_asked_for_news_of_its_cache(tmp_path: Path) -> None:
    async with deployed(tmp_path, 1, placement=BestScore(KEY)) as deployment:
        listener = deployment.ask(0, 200)
        assert await listener.all_ids() == expected_tokens(prompt(0), 200)
        assert not cache_is_observed(deployment.replicas[0])
