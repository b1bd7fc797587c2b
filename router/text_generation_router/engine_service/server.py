"""The engine's gRPC server: opens its ports, drains and closes."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from text_generation_common.cluster.endpoints import Endpoint
from text_generation_common.cluster.identity import Role
from text_generation_common.cluster.security import Security, server_options
from text_generation_common.tasks import cancelled
from text_generation_proto import engine_pb2_grpc as pb_grpc
from text_generation_router.engine.local import LocalEngine
from text_generation_router.engine_service.identity import EngineIdentity
from text_generation_router.engine_service.servicer import EngineServicer
from text_generation_router.engine_service.work import ENVELOPE_BYTES, MESSAGE_BYTES, submit_bytes
from text_generation_router.fleet.cache_news import CacheLog
from text_generation_router.metrics.metrics import Metrics

# Maximum number of calls at a time: two streams of each front, and Health and Metrics.
MAX_CALLS = 1024
# Maximum number of calls at a time on one connection: further calls wait at the front.
MAX_CALLS_OF_FRONT = 16
# Seconds that open calls get to end after the engine has ended.
CLOSE_S = 1.0


class EngineServer:
    """Serves an engine that has started to its fronts."""

    def __init__(
        self,
        engine: LocalEngine,
        identity: EngineIdentity,
        metrics: Metrics,
        max_concurrent_requests: int,
        security: Security,
        cache: CacheLog | None = None,
    ) -> None:
        """`security`: how ports with the role of an engine are protected. `cache`: collects the changes of the prefix
        cache for the fronts that ask for them; None: changes are not reported."""
        self._engine = engine
        self._security = security
        self._servicer = EngineServicer(engine, identity, metrics, max_concurrent_requests, cache)
        largest = max(MESSAGE_BYTES, submit_bytes(engine.snapshot())) + ENVELOPE_BYTES
        self._server = grpc.aio.server(
            interceptors=security.guard({Role.FRONT}),
            options=[*server_options(largest), ("grpc.max_concurrent_streams", MAX_CALLS_OF_FRONT)],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        pb_grpc.add_EngineServiceServicer_to_server(self._servicer, self._server)
        self._news: asyncio.Task[None] | None = None

    async def listen(self, endpoint: Endpoint) -> int:
        """Begins to serve; a unix socket is for this process's user only. Returns the port. AddressInUse and
        CredentialsError: see `Security.add_port`."""
        with _only_for_owner():
            port = self._security.add_port(self._server, endpoint)
        await self._server.start()
        self._news = asyncio.create_task(self._servicer.news.run(), name="news")
        return port

    @property
    def num_fronts(self) -> int:
        return len(self._servicer.fronts)

    def drain(self) -> None:
        """Refuses new requests from now on, and reports that to all fronts. Accepted requests go on to their ends."""
        self._engine.drain()
        self._servicer.news.hurry()

    async def close(self) -> None:
        """Closes the engine. Every request ends with ENGINE_CLOSED, and the front continues the request on another
        engine."""
        await self._servicer.close()
        await self._server.stop(CLOSE_S)
        if self._news is not None:
            await cancelled(self._news)


@contextmanager
def _only_for_owner() -> Iterator[None]:
    """Inside this context, new sockets can be read and written by their owner only."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
