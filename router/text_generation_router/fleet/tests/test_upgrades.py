"""Engines and fronts of two versions of the protocol side by side, and of two builds, while streams run."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from text_generation_common.cluster.endpoints import UnixEndpoint
from text_generation_common.cluster.identity import Role
from text_generation_common.cluster.security import Security
from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.tests.fakes import Listener, World, expected_tokens, prompt
from text_generation_router.engine_service.identity import EngineIdentity
from text_generation_router.engine_service.server import EngineServer
from text_generation_router.fleet import books
from text_generation_router.fleet.books import STRANDED
from text_generation_router.fleet.engine import RemoteEngine
from text_generation_router.scheduling.request import EndReason, GenerationRequest
from text_generation_router.wire.version import VERSION, WITH_BEGUN

LOGGER = logging.getLogger("test")


class OldContext:
    """A call between two sides, one of which knows only the version of the protocol before WITH_BEGUN: this side
    neither sends nor understands newer messages."""

    def __init__(self, context: Any, seen: list[str]) -> None:
        self._context = context
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        message = await self._context.read()
        if isinstance(message, pb.FrontMessage):
            if message.HasField("hello"):
                assert message.hello.version == VERSION
                message.hello.version = WITH_BEGUN - 1
            message.submit.losses.ClearField("group") if message.HasField("submit") else None
            message.withdraw.ClearField("even_begun") if message.HasField("withdraw") else None
        return message

    async def write(self, message: Any) -> None:
        if isinstance(message, pb.EngineMessage):
            self._seen.append(message.WhichOneof("message"))
            assert message.WhichOneof("message") != "begun"
        elif message.HasField("load"):
            message.load.ClearField("newest_index")
        await self._context.write(message)


class Build:
    """One run of an engine's process at `path`."""

    def __init__(self, path: Path, life: int, is_old: bool, digest: bytes = b"digest") -> None:
        self.world = World()
        self.endpoint = UnixEndpoint(str(path))
        self.identity = EngineIdentity(f"{path.name} {life}", life, digest)
        self.is_old = is_old
        self.seen: list[str] = []

    async def start(self) -> "Build":
        await self.world.engine.start()
        security = Security(Role.ENGINE, None, insecure=False, logger=LOGGER)
        self.server = EngineServer(self.world.engine, self.identity, self.world.metrics, 16, security)
        if self.is_old:
            servicer, work, news = self.server._servicer, self.server._servicer.Work, self.server._servicer.News
            servicer.Work = lambda messages, context: work(messages, OldContext(context, self.seen))  # type: ignore
            servicer.News = lambda request, context: news(request, OldContext(context, self.seen))  # type: ignore
        await self.server.listen(self.endpoint)
        return self

    async def drain(self, patience_s: float) -> None:
        """Ends as the engine process does after a signal."""
        self.server.drain()
        loop = asyncio.get_running_loop()
        until_s = loop.time() + patience_s
        while not self.world.engine.is_idle and loop.time() < until_s:
            await asyncio.sleep(0.01)
        await self.stop()

    async def stop(self) -> None:
        await self.server.close()
        await self.world.engine.close()


def front_of(paths: list[Path], resumes_across_builds: bool = False) -> RemoteEngine:
    security = Security(Role.FRONT, None, insecure=False, logger=LOGGER)
    return RemoteEngine([UnixEndpoint(str(path)) for path in paths], security, None, resumes_across_builds)


def ask(front: RemoteEngine, number: int, count: int, credits: int = 10**9) -> Listener:
    listener = Listener()
    [listener.index] = front.submit_all([GenerationRequest(tuple(prompt(number)), count)], [listener], credits).indexes
    return listener


async def connected(front: RemoteEngine, holds: Callable[[list[str]], bool]) -> None:
    while not holds(sorted(view.facts.engine_id for view in front._fleet.engines.values())):
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("from_old", [True, False], ids=["upgrade", "downgrade"])
def test_engines_are_replaced_by_those_of_the_next_version_one_after_the_other_and_no_stream_notices(
    tmp_path: Path, from_old: bool
) -> None:
    async def use() -> None:
        paths = [tmp_path / "a", tmp_path / "b"]
        builds = [await Build(path, 1, from_old).start() for path in paths]
        front = front_of(paths)
        await front.start()
        await connected(front, lambda lives: lives == ["a 1", "b 1"])
        asked: list[Listener] = []
        is_over = asyncio.Event()

        async def load() -> None:
            while not is_over.is_set():
                asked.append(ask(front, len(asked) % 8, 60))
                await asked[-1].until_tokens(20)  # so that several requests run at a time

        loading = [asyncio.create_task(load()) for _ in range(4)]
        for place, path in enumerate(paths):
            while len(asked) < 12 * (place + 1) or builds[place].world.engine.is_idle:
                await asyncio.sleep(0.005)
            await builds[place].drain(0.5 * place)
            builds[place] = await Build(path, 2, not from_old).start()
            await connected(front, lambda lives, place=place: f"{paths[place].name} 2" in lives)
        while len(asked) < 40:
            await asyncio.sleep(0.01)
        is_over.set()
        await asyncio.gather(*loading)
        for number, listener in enumerate(asked):
            assert await listener.all_ids() == expected_tokens(prompt(number % 8), 60)
        assert front.counts.moves > 0 and front.counts.broken_rules == 0
        await front.close()
        for build in builds:
            await build.stop()

    asyncio.run(asyncio.wait_for(use(), 120))


@pytest.mark.parametrize("first_is_old", [True, False])
def test_a_stream_moves_between_engines_of_two_versions(tmp_path: Path, first_is_old: bool) -> None:
    async def use() -> None:
        paths = [tmp_path / "a", tmp_path / "b"]
        first = await Build(paths[0], 1, first_is_old).start()
        front = front_of(paths)
        await front.start()
        asked = [ask(front, number, 90, credits=40) for number in range(3)]
        for listener in asked:
            await listener.until_tokens(40)
        second = await Build(paths[1], 1, not first_is_old).start()
        await connected(front, lambda lives: len(lives) == 2)
        await first.server._server.stop(None)  # the streams break, as when the process is killed
        for number, listener in enumerate(asked):
            front.credit(listener.index, 100)
            assert await listener.all_ids() == expected_tokens(prompt(number), 90)
        assert front.counts.resumes == 3 and front.counts.broken_rules == 0
        await front.close()
        await first.stop()
        await second.stop()

    asyncio.run(asyncio.wait_for(use(), 60))


@pytest.mark.parametrize("is_allowed", [False, True])
def test_an_engine_of_another_build_takes_new_requests_and_goes_on_with_others_only_if_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_allowed: bool
) -> None:
    monkeypatch.setattr(books, "STRANDED_S", 0.5)

    async def use() -> None:
        path = tmp_path / "a"
        first = await Build(path, 1, False, b"one build").start()
        front = front_of([path], is_allowed)
        await front.start()
        begun = ask(front, 0, 90, credits=40)
        await begun.until_tokens(40)
        await first.stop()
        front.credit(begun.index, 100)
        second = await Build(path, 2, False, b"another").start()
        assert await ask(front, 1, 5).all_ids() == expected_tokens(prompt(1), 5)
        end = await begun.until_end()
        if is_allowed:
            assert end.reason is EndReason.LENGTH and begun.ids == expected_tokens(prompt(0), 90)
        else:
            assert end.reason is EndReason.FAILED and end.cause == STRANDED
        await front.close()
        await second.stop()

    asyncio.run(asyncio.wait_for(use(), 60))
