"""Starts an engine without HTTP, serves it to its fronts, and stops it once its requests have ended."""

import asyncio
import logging
import signal
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import uvloop

from text_generation_common.cluster.endpoints import TcpEndpoint, parse_endpoint
from text_generation_common.cluster.identity import Role
from text_generation_common.errors import ArgumentValidation, CommandError
from text_generation_common.flags.cluster import SecurityFlags
from text_generation_common.flags.kinds import LoadFormat
from text_generation_common.flags.model import ComputeFlags, ShardFlags
from text_generation_common.flags.requests import SchedulingFlags, TokenFlags
from text_generation_common.tasks import cancelled
from text_generation_router.engine.lifecycle import EngineConfig
from text_generation_router.engine.local import LocalEngine
from text_generation_router.engine.shard_groups import ShardGroups
from text_generation_router.engine_service.identity import EngineIdentity, engine_digest
from text_generation_router.engine_service.page import EnginePage, serving_page
from text_generation_router.engine_service.server import EngineServer
from text_generation_router.engines import line_to_launcher, security_of, shard_groups
from text_generation_router.errors import ShardsError, StartError
from text_generation_router.fleet.cache_news import BlockHasher, CacheLog
from text_generation_router.metrics.joint import joined_with_others
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.metrics.page import OwnFamilies, render_in_turns
from text_generation_router.serve import SWITCH_S
from text_generation_router.text.model_files import find_model_files

logger = logging.getLogger("text_generation_router")

# Seconds between two looks at whether the last request has ended.
POLL_S = 0.05
# Seconds between two looks whether any front is connected.
FRONTS_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    model: str  # a local directory or a hub id
    revision: str | None
    weights_cache_override: str | None  # a folder with the model's files, used instead of `model`
    load_format: LoadFormat
    address: str  # where fronts connect
    max_concurrent_requests: int
    tokens: TokenFlags
    scheduling: SchedulingFlags
    compute: ComputeFlags
    shard: ShardFlags
    tgi_buckets: bool
    patience_s: float  # seconds that requests get to end after the first signal
    master_shard_uds_path: str
    # Key of what fronts are told of the cache; None: they are not told.
    block_hash_key: bytes | None = field(repr=False)
    launcher_fd: int | None
    metrics_file: str | None  # file with this process's metrics; None: it has none
    # `EnginePage` has the first free one of these ports, on the host of `address`; none: there is no page.
    metrics_ports: range
    end_without_fronts_s: float = 0.0  # seconds without fronts after which the launcher is told; 0: never
    security: SecurityFlags


def run(settings: EngineSettings) -> None:
    """Serves until a signal. Raises StartError if the engine cannot start, ShardsError if it has no shards."""
    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, suppress(asyncio.CancelledError):
        runner.run(_serve(settings))


async def _serve(settings: EngineSettings) -> None:
    stop = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        # A signal during the start ends the start: no request was accepted yet.
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        endpoint = parse_endpoint(settings.address, listens=True)
        host = endpoint.host if isinstance(endpoint, TcpEndpoint) else None
        if settings.metrics_ports and host is None:
            raise ArgumentValidation("--engine-metrics-port needs an --address with a host: leave it out")
        security = security_of(Role.ENGINE, settings.security, host)
        security.check(endpoint)
    except CommandError as error:
        raise StartError(f"{error.reason}: {error.hint}" if error.hint else error.reason) from None
    folder = find_model_files(settings.model, settings.revision, settings.weights_cache_override).folder
    metrics = Metrics(settings.tgi_buckets)
    groups = shard_groups(await line_to_launcher(settings.launcher_fd), settings.master_shard_uds_path)
    config = EngineConfig(settings.tokens, settings.scheduling, settings.max_concurrent_requests)
    engine = LocalEngine(groups, config, metrics)
    server: EngineServer | None = None
    try:
        await engine.start()
        digest = await asyncio.to_thread(
            engine_digest,
            folder,
            engine.snapshot().model,
            compute=settings.compute,
            shard=settings.shard,
            load_format=settings.load_format,
        )
        identity = EngineIdentity(uuid.uuid4().hex, _term(), digest)
        key = settings.block_hash_key
        cache = CacheLog(BlockHasher(key)) if key is not None else None
        server = EngineServer(
            engine=engine,
            identity=identity,
            metrics=metrics,
            max_concurrent_requests=settings.max_concurrent_requests,
            security=security,
            cache=cache,
        )
        try:
            port = await server.listen(endpoint)
        except CommandError as error:
            raise StartError(error.reason) from None
        address = replace(endpoint, port=port).target if isinstance(endpoint, TcpEndpoint) else endpoint.target
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        page = EnginePage(lambda: render_in_turns(OwnFamilies(metrics.registry)), engine.is_healthy)
        async with (
            joined_with_others(metrics, settings.metrics_file),
            serving_page(page, host or "", settings.metrics_ports),
        ):
            groups.listening(address)
            logger.info("Engine serves its fronts at %s", address)
            desertion = Desertion(settings.end_without_fronts_s, time.monotonic())
            watching = asyncio.create_task(_watch_fronts(server, desertion, groups))
            try:
                await _until_stopped(engine, server, stop, settings.patience_s)
            finally:
                await cancelled(watching)
        if engine.failed.done():
            raise ShardsError("the engine has failed and generates no more text; its log line has the cause")
    finally:
        if server is not None:
            await server.close()
        await engine.close()


async def _until_stopped(engine: LocalEngine, server: EngineServer, stop: asyncio.Event, patience_s: float) -> None:
    stopped = asyncio.create_task(stop.wait())
    ends: list[asyncio.Future[Any]] = [stopped, engine.failed]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(stopped)
    if engine.failed.done():
        return
    logger.info("signal received, the engine ends after its last request")
    server.drain()
    until_s = time.monotonic() + patience_s
    while not engine.is_idle and time.monotonic() < until_s and not engine.failed.done():
        await asyncio.sleep(POLL_S)


class Desertion:
    """Decides when an engine has been without fronts for too long. Does no input or output."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        """`limit_s`: 0 if it may be without fronts for ever."""
        self.limit_s = limit_s
        self._since_s = now_s

    def judge(self, num_fronts: int, now_s: float) -> bool:
        if num_fronts:
            self._since_s = now_s
        return 0 < self.limit_s <= now_s - self._since_s


async def _watch_fronts(server: EngineServer, desertion: Desertion, groups: ShardGroups) -> None:
    while not desertion.judge(server.num_fronts, time.monotonic()):
        await asyncio.sleep(FRONTS_POLL_S)
    groups.deserted(f"{desertion.limit_s:.0f} s")


def _term() -> int:
    """Tells this life from the others of the replica, by the time of its start."""
    return time.time_ns()
