"""Makes the engine that a router serves: in this process with its shards, or in other processes."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from text_generation_common.cluster.endpoints import parse_endpoint
from text_generation_common.cluster.identity import Role
from text_generation_common.cluster.security import Security
from text_generation_common.errors import CommandError
from text_generation_common.link import Link, LinkEvent, LinkMessage
from text_generation_common.tasks import cancelled
from text_generation_router.config import RouterConfig
from text_generation_router.engine.config import EngineConfig
from text_generation_router.engine.local import LocalEngine
from text_generation_router.engine.protocol import EngineRun
from text_generation_router.engine.shard_groups import LaunchedGroups, ShardGroups, StandaloneGroups
from text_generation_router.errors import StartError
from text_generation_router.metrics import Metrics
from text_generation_router.remote.best_score import placement_of
from text_generation_router.remote.engine import RemoteEngine
from text_generation_router.remote.placement import MOST_ENGINES
from text_generation_router.sockets import inherited_socket

logger = logging.getLogger("text_generation_router")

# Seconds for the launcher to answer that a front may leave.
ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class ServedEngine:
    run: EngineRun
    permits: Callable[[], int]  # number of requests that this router may have there at a time
    listening: Callable[[], None]  # tells the launcher, if there is one, that the router serves requests
    close: Callable[[], Awaitable[None]]  # closes the engine and the line to the launcher
    others: "FrontLine | None" = None  # the line of a front to its launcher, which has other fronts on the port


async def find_engine(config: RouterConfig, metrics: Metrics) -> ServedEngine:
    """The engine of the config. It is not started. Raises StartError."""
    link = await line_to_launcher(config.launcher_fd)
    if config.engines:
        return _remote(config, link)
    groups = shard_groups(link, config.master_shard_uds_path)
    most = config.requests.max_concurrent_requests
    engine = LocalEngine(groups, EngineConfig(config.tokens, config.scheduling, most), metrics)
    return ServedEngine(engine, lambda: most, groups.listening, engine.close)


async def line_to_launcher(launcher_fd: int | None) -> Link | None:
    """Raises StartError if `launcher_fd` is not a socket."""
    return await Link.open(inherited_socket("--launcher-fd", launcher_fd)) if launcher_fd is not None else None


def shard_groups(link: Link | None, master_uds_path: str) -> ShardGroups:
    """The groups that a launcher starts, or the shards that run without one."""
    return LaunchedGroups(link, master_uds_path) if link is not None else StandaloneGroups(master_uds_path)


def _remote(config: RouterConfig, link: Link | None) -> ServedEngine:
    try:
        security = Security(Role.FRONT, tls_dir=None, insecure=False, logger=logger)
        endpoints = [parse_endpoint(text) for text in config.engines]
        for endpoint in endpoints:
            security.check(endpoint)
    except CommandError as error:
        raise StartError(error.reason) from None
    placement = placement_of(config.placement, config.block_hash_key, random.randrange(MOST_ENGINES))
    engine = RemoteEngine(endpoints, security, placement)
    line = FrontLine(link, engine.failed)

    async def close() -> None:
        await engine.close()
        await line.close()

    return ServedEngine(engine, lambda: engine.permits, line.listening, close, line if link is not None else None)


class FrontLine:
    """The line from a router whose engines are other processes to its launcher, which may be absent. Implements
    OtherServers: the launcher knows whether other fronts take the place of this one."""

    def __init__(self, link: Link | None, over: "asyncio.Future[None]") -> None:
        """`over` is set when the launcher ends."""
        self._link = link
        self._over = over
        self._may_leave = asyncio.Event()
        self.are_ending = False
        self._task = asyncio.create_task(self._listen(link), name="launcher") if link is not None else None

    def listening(self) -> None:
        if self._link is not None:
            self._link.send(LinkMessage(LinkEvent.LISTENING))

    async def take_over(self) -> bool:
        """Without an answer of the launcher there may be no other front, and this one goes on to accept connections."""
        if self._link is None:
            return False
        self._link.send(LinkMessage(LinkEvent.DRAINING))
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await self._may_leave.wait()
        return self._may_leave.is_set() and not self.are_ending

    async def _listen(self, link: Link) -> None:
        while (message := await link.receive()) is not None:
            if message.event is LinkEvent.PING:
                link.send(LinkMessage(LinkEvent.PONG))
            elif message.event in (LinkEvent.LEAVE, LinkEvent.ENDING):
                self.are_ending |= message.event is LinkEvent.ENDING
                self._may_leave.set()
        if not self._over.done():
            self._over.set_result(None)

    async def close(self) -> None:
        if self._task is not None:
            await cancelled(self._task)
        if self._link is not None:
            self._link.close()
