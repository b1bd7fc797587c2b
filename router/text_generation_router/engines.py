"""Makes the engine that a router serves: in this process with its shards, or in other processes."""

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from text_generation_common.adapters.listed import ANY_MODEL, folders_of
from text_generation_common.cluster.endpoints import TcpEndpoint, parse_endpoint
from text_generation_common.cluster.files import role_folder
from text_generation_common.cluster.identity import Role
from text_generation_common.cluster.security import Security
from text_generation_common.errors import ArgumentValidation, CommandError
from text_generation_common.flags.cluster import SecurityFlags
from text_generation_common.link import Link, LinkEvent, LinkMessage, ReplicaReport
from text_generation_common.tasks import cancelled
from text_generation_router.api.common.adapters import ServedAdapters
from text_generation_router.config import RouterConfig
from text_generation_router.engine.lifecycle import EngineConfig
from text_generation_router.engine.local import LocalEngine
from text_generation_router.engine.protocol import EngineRun
from text_generation_router.engine.shard_groups import LaunchedGroups, ShardGroups, StandaloneGroups
from text_generation_router.errors import ScalingError, StartError
from text_generation_router.fleet.choice import MAX_ENGINES
from text_generation_router.fleet.engine import RemoteEngine
from text_generation_router.fleet.engine_file import FollowedFile, FollowedName
from text_generation_router.fleet.placement import placement_of
from text_generation_router.metrics.metrics import Metrics

# Sockets that a router inherits from its launcher.


def inherited_socket(flag: str, descriptor: int) -> socket.socket:
    try:
        return socket.socket(fileno=descriptor)
    except OSError as error:
        raise StartError(f"{flag} {descriptor} is not a socket: {error.strerror}") from error


logger = logging.getLogger("text_generation_router")

# Seconds for the launcher to answer that a front may leave, or to a wish for replicas.
ANSWER_S = 2.0
# Seconds between two messages that tell the launcher what clients demand.
DEMAND_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedEngine:
    run: EngineRun
    permits: Callable[[], int]  # number of requests that the engine takes at a time
    permits_elsewhere: Callable[[], int]  # the part of them that other fronts have there
    listening: Callable[[], None]  # tells the launcher, if there is one, that the router serves requests
    close: Callable[[], Awaitable[None]]  # closes the engine and the line to the launcher
    adapters: ServedAdapters
    replicas: "FrontLine | None" = None  # the line to a launcher that may have replicas
    others: "FrontLine | None" = None  # the line of a front to its launcher, which has other fronts on the port


async def find_engine(config: RouterConfig, metrics: Metrics) -> ServedEngine:
    """The engine of the config. It is not started. Raises StartError."""
    link = await line_to_launcher(config.launcher_fd)
    names = (config.served_model_name, config.tokenizer_name, *ANY_MODEL)
    adapters = ServedAdapters(config.adapters, folders_of(config.adapter_list.lora_dirs), link, names)
    if config.is_front:
        return await _remote(config, link, metrics, adapters)
    groups = shard_groups(link, config.master_shard_uds_path, adapters.take)
    most = config.requests.max_concurrent_requests
    engine = LocalEngine(groups, EngineConfig(config.tokens, config.scheduling, most), metrics)
    adapters.engine = engine

    async def close() -> None:
        await adapters.close()
        await engine.close()

    return ServedEngine(
        run=engine,
        permits=lambda: most,
        permits_elsewhere=lambda: 0,
        listening=groups.listening,
        close=close,
        adapters=adapters,
    )


async def line_to_launcher(launcher_fd: int | None) -> Link | None:
    """Raises StartError if `launcher_fd` is not a socket."""
    return await Link.open(inherited_socket("--launcher-fd", launcher_fd)) if launcher_fd is not None else None


def shard_groups(
    link: Link | None, master_uds_path: str, on_other: Callable[[LinkMessage], None] = lambda message: None
) -> ShardGroups:
    """The groups that a launcher starts, or the shards that run without one. `on_other` is called with the launcher's
    messages that are not about shards."""
    return LaunchedGroups(link, master_uds_path, on_other) if link is not None else StandaloneGroups(master_uds_path)


async def _remote(config: RouterConfig, link: Link | None, metrics: Metrics, adapters: ServedAdapters) -> ServedEngine:
    try:
        security = security_of(Role.FRONT, config.security, None)
        endpoints = [parse_endpoint(text) for address in config.engine_list.engines for text in address.split(",")]
        name = _name_to_follow(config.engine_list.engines_dns)
        for endpoint in (*endpoints, *([name] if name is not None else [])):
            security.check(endpoint)
    except CommandError as error:
        raise StartError(f"{error.reason}: {error.hint}" if error.hint else error.reason) from None
    placement = placement_of(config.placement, config.block_hash_key, random.randrange(MAX_ENGINES))
    engine = RemoteEngine(endpoints, security, placement, config.engine_list.resume_across_builds)
    _show(engine, metrics)
    tasks = [asyncio.create_task(_follow(name, engine), name="engines by name")] if name is not None else []
    if config.engine_list.engines_file is not None:
        followed = FollowedFile(Path(config.engine_list.engines_file), engine.connect)
        tasks.append(asyncio.create_task(followed.run(), name="engines in a file"))
    adapters.engine = engine
    line = FrontLine(link, engine, metrics.note_replicas, adapters.take)

    async def close() -> None:
        await cancelled(*tasks)
        await adapters.close()
        await engine.close()
        await line.close()

    def permits() -> int:
        return config.requests.max_concurrent_requests * max(1, engine.num_engines)

    def permits_elsewhere() -> int:
        return max(0, permits() - engine.permits)

    launched = line if link is not None else None
    return ServedEngine(
        run=engine,
        permits=permits,
        permits_elsewhere=permits_elsewhere,
        listening=line.listening,
        close=close,
        adapters=adapters,
        replicas=launched,
        others=launched,
    )


def security_of(role: Role, flags: SecurityFlags, host: str | None) -> Security:
    """How this process protects its ports. `host`: see `role_folder`. Raises CredentialsError."""
    folder = role_folder(Path(flags.tls_dir), role, host) if flags.tls_dir is not None else None
    return Security(role, folder, flags.insecure_cluster, logger)


def _name_to_follow(text: str | None) -> TcpEndpoint | None:
    if text is None:
        return None
    endpoint = parse_endpoint(text)
    if not isinstance(endpoint, TcpEndpoint):
        raise ArgumentValidation(f"--engines-dns {text}: not a DNS name with a port: give NAME:PORT")
    return endpoint


async def _follow(name: TcpEndpoint, engine: RemoteEngine) -> None:
    await FollowedName(name, engine.connect, engine.is_connected).run()


def _show(engine: RemoteEngine, metrics: Metrics) -> None:
    """From now on the page of metrics shows what happens between this front and its engines."""
    for count, counter in metrics.front_counters.items():
        counter.set_function(partial(getattr, engine.counts, count))
    metrics.front_engines.set_function(lambda: engine.num_engines)
    metrics.front_suspects.set_function(lambda: engine.num_suspects)
    metrics.front_cached_blocks.set_function(lambda: engine.num_cached_blocks)


class FrontLine:
    """The line from a router whose engines are other processes to its launcher, which may be absent. Implements
    OtherServers: the launcher knows whether other fronts take the place of this one."""

    def __init__(
        self,
        link: Link | None,
        engine: RemoteEngine,
        on_report: Callable[[ReplicaReport], None] = lambda report: None,
        on_other: Callable[[LinkMessage], None] = lambda message: None,
    ) -> None:
        """`engine` fails when the launcher ends. `on_report` is called when the launcher tells of its replicas,
        `on_other` with messages that are not about engines or other fronts."""
        self._link = link
        self._may_leave = asyncio.Event()
        self.are_ending = False
        self._engine = engine
        self._on_report = on_report
        self._on_other = on_other
        self.report: ReplicaReport | None = None  # what the launcher told last of its replicas
        self._reported = asyncio.Event()
        self._scaling = asyncio.Lock()
        self._scaled: asyncio.Future[str] | None = None  # the launcher's answer to `scale`
        self._tasks: list[asyncio.Task[None]] = []
        if link is not None:
            self._tasks = [
                asyncio.create_task(self._listen(link), name="launcher"),
                asyncio.create_task(self._connect(), name="engines of the launcher"),
                asyncio.create_task(self._report_demand(link), name="demand"),
            ]

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
            elif message.event is LinkEvent.ENGINES and message.deployment is not None:
                self.report = message.deployment
                self._on_report(message.deployment)
                self._reported.set()
            elif message.event is LinkEvent.SCALED and self._scaled is not None and not self._scaled.done():
                self._scaled.set_result(message.reason)
            else:
                self._on_other(message)
        if not self._engine.failed.done():
            self._engine.failed.set_result(None)

    async def _connect(self) -> None:
        """Apart from `_listen`, so that pings are answered while connections to engines that left are closed."""
        while True:
            await self._reported.wait()
            self._reported.clear()
            if self.report is not None:
                await self._engine.connect(map(parse_endpoint, self.report.endpoints))

    async def _report_demand(self, link: Link) -> None:
        while True:
            await asyncio.sleep(DEMAND_S)
            link.send(LinkMessage(LinkEvent.DEMAND, demand=self._engine.demand))

    async def scale(self, wanted: int) -> None:
        """Implements ReplicaControl. One request at a time, so that an answer belongs to the last one."""
        if self._link is None:
            raise ScalingError("this front has no launcher: scale its engines where they were started")
        async with self._scaling:
            self._scaled = asyncio.get_running_loop().create_future()
            self._link.send(LinkMessage(LinkEvent.SCALE, replicas=wanted))
            try:
                reason = await asyncio.wait_for(self._scaled, ANSWER_S)
            except TimeoutError:
                raise ScalingError(f"the launcher did not answer within {ANSWER_S:g} s: look at its log") from None
        if reason:
            raise ScalingError(reason)

    async def close(self) -> None:
        await cancelled(*self._tasks)
        if self._link is not None:
            self._link.close()
