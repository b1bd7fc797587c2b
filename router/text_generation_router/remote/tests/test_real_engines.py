"""RemoteEngine and several real engines with fake shards, each behind its service on a unix socket."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from text_generation_common.cluster.endpoints import TcpEndpoint, UnixEndpoint
from text_generation_common.cluster.identity import Identity, Role
from text_generation_common.cluster.issuing import Authority
from text_generation_common.cluster.security import Security
from text_generation_common.errors import CredentialsError
from text_generation_router.engine.tests.fakes import Listener, World, expected_tokens, prompt
from text_generation_router.engine_service.identity import EngineIdentity
from text_generation_router.engine_service.server import EngineServer
from text_generation_router.remote.engine import RemoteEngine
from text_generation_router.scheduling.request import EndReason, GenerationRequest

LOGGER = logging.getLogger("test")


class Replica:
    """One engine process's parts."""

    def __init__(self, path: Path, term: int, **limits: int) -> None:
        self.world = World(**limits)
        self.endpoint = UnixEndpoint(str(path))
        self.term = term

    async def start(self) -> None:
        await self.world.engine.start()
        security = Security(Role.ENGINE, None, insecure=False, logger=LOGGER)
        identity = EngineIdentity(f"{self.endpoint.path} {self.term}", self.term, b"digest")
        self.server = EngineServer(self.world.engine, identity, self.world.metrics, 16, security)
        await self.server.listen(self.endpoint)

    async def stop(self) -> None:
        await self.server.close()
        await self.world.engine.close()

    async def die(self) -> None:
        """Ends the streams without a word, as the death of the process does."""
        await self.server._server.stop(None)

    @property
    def made(self) -> int:
        """Number of requests that the shards have worked on."""
        return len({index for step in self.world.forward_steps for index in step.request_ids})


class Deployment:
    def __init__(self, folder: Path, count: int, **limits: int) -> None:
        self.answers: list[asyncio.Future[None]] = []
        self.replicas = [Replica(folder / str(number), 1, **limits) for number in range(count)]
        client = Security(Role.FRONT, None, insecure=False, logger=LOGGER)
        self.front = RemoteEngine([replica.endpoint for replica in self.replicas], client)

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


def run(folder: Path, use: Callable[[Deployment], Awaitable[None]], count: int = 2, **limits: int) -> None:
    async def deployed() -> None:
        deployment = Deployment(folder, count, **limits)
        try:
            await deployment.start()
            await asyncio.wait_for(use(deployment), 60)
            assert deployment.front.counts.broken_rules == 0
        finally:
            await deployment.stop()

    asyncio.run(deployed())


async def texts_are_right(asked: list[Listener], count: int) -> None:
    for number, listener in enumerate(asked):
        assert await listener.all_ids() == expected_tokens(prompt(number), count)


def test_texts_go_on_unbroken_when_one_of_two_engines_dies(tmp_path: Path) -> None:
    async def use(deployment: Deployment) -> None:
        asked = [deployment.ask(number, 40) for number in range(8)]
        for listener in asked:
            await listener.until_tokens(3)
        dead = deployment.replicas[0]
        assert all(replica.made for replica in deployment.replicas)
        await dead.die()
        await texts_are_right(asked, 40)
        assert deployment.front.counts.lost_engines == 1 and deployment.front.counts.resumes == dead.made

    run(tmp_path, use)


def test_texts_go_on_unbroken_when_one_of_two_engines_is_closed_and_none_is_a_suspect(tmp_path: Path) -> None:
    async def use(deployment: Deployment) -> None:
        asked = [deployment.ask(number, 40) for number in range(8)]
        for listener in asked:
            await listener.until_tokens(3)
        await deployment.replicas[0].stop()
        await texts_are_right(asked, 40)
        counts = deployment.front.counts
        assert counts.moves == deployment.replicas[0].made and not counts.resumes

    run(tmp_path, use)


def test_texts_go_on_unbroken_when_the_only_engine_dies_and_another_comes(tmp_path: Path) -> None:
    async def use(deployment: Deployment) -> None:
        asked = [deployment.ask(number, 40) for number in range(6)]
        for listener in asked:
            await listener.until_tokens(3)
        await deployment.replicas[0].stop()
        waiting = deployment.ask(6, 40)
        deployment.replicas[0] = Replica(tmp_path / "0", 2)
        await deployment.replicas[0].start()
        await texts_are_right([*asked, waiting], 40)

    run(tmp_path, use, 1)


def test_queued_requests_leave_an_engine_that_drains_and_running_ones_end_there(tmp_path: Path) -> None:
    async def use(deployment: Deployment) -> None:
        first, second = deployment.replicas
        asked = [deployment.ask(number, 60) for number in range(8)]
        await asyncio.gather(*deployment.answers)
        while not first.made:
            await asyncio.sleep(0.002)
        first.server.drain()
        await texts_are_right(asked, 60)
        assert first.made == 1 and second.made == 7 and deployment.front.counts.moves > 0
        assert deployment.front.counts.lost_engines == 0

    run(tmp_path, use, max_rows=1, max_batch_size=1)


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
        await asyncio.sleep(0.5)  # several tries to connect, and one line
        told = [line.getMessage() for line in caplog.records if "cannot be reached" in line.getMessage()]
        [foreign] = [line for line in told if endpoints[1].target in line]
        assert "cannot be reached: the peer's certificate is refused: unable to get local issuer" in foreign
        assert len(front._fleet.engines) == 1 and not worlds["foreign"].forward_steps
        await front.close()
        for server, world in zip(servers, worlds.values(), strict=True):
            await server.close()
            await world.engine.close()

    asyncio.run(asyncio.wait_for(use(), 60))


def test_tcp_without_certificates_is_refused(tmp_path: Path) -> None:
    async def use() -> None:
        front = RemoteEngine([TcpEndpoint("127.0.0.1", 1)], Security(Role.FRONT, None, insecure=False, logger=LOGGER))
        with pytest.raises(CredentialsError):
            await front.start()
        await front.close()

    asyncio.run(use())


def test_a_front_that_leaves_frees_its_rows(tmp_path: Path) -> None:
    async def use(deployment: Deployment) -> None:
        listener = deployment.ask(0, 400)
        await listener.until_tokens(2)
        await deployment.front.close()
        assert listener.end is not None and listener.end.reason is EndReason.CLOSED
        scheduler = deployment.replicas[0].world.engine._scheduler
        async with asyncio.timeout(5):
            while not scheduler.is_idle:
                await asyncio.sleep(0.01)

    run(tmp_path, use, 1)
