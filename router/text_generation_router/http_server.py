"""The HTTP server and its end: who is inside finishes, nobody comes in, and after a while it is over all the same."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from fastapi import FastAPI

from text_generation_router.api.gate import Gate
from text_generation_router.api.http_protocol import Connection
from text_generation_router.api.limits import ConnectionLimits, LimitHits

logger = logging.getLogger(__name__)

# Longer than clients keep idle connections, so that they never write to one that is being closed.
KEEP_ALIVE_S = 75
# For what has been ended to reach the clients.
LAST_WORDS_S = 5.0
POLL_S = 0.05


class Server(uvicorn.Server):
    """`end_streams` gives every unfinished generation its end; `patience_s` after the signal it is called.

    `on_listening` is called when connections are accepted.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gate: Gate,
        end_streams: Callable[[], Awaitable[None]],
        patience_s: float,
        on_listening: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._on_listening = on_listening
        self._gate = gate
        self._end_streams = end_streams
        self._patience_s = patience_s
        self.last_words_s = LAST_WORDS_S

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    def stop(self) -> None:
        """Nothing can be done for anybody any more: all have been told so."""
        self._gate.shut()
        self.should_exit = True

    async def drain(self) -> None:
        """It goes on listening meanwhile, and answers 503."""
        self._gate.shut()
        until_s = asyncio.get_running_loop().time() + self._patience_s
        try:
            if not await self._gate.is_empty_within(self._patience_s):
                logger.warning(
                    "%d requests have not finished in %g s: ending them", self._gate.inside, self._patience_s
                )
                await self._end_streams()
                await self._gate.is_empty_within(self.last_words_s)
            while self._is_unread() and asyncio.get_running_loop().time() < until_s:
                await asyncio.sleep(POLL_S)
        finally:
            self.should_exit = True

    def _is_unread(self) -> bool:
        """Whether the clients have not taken yet what was said to them. Those that never do lose their connection."""
        return any(connection.transport.get_write_buffer_size() for connection in self.server_state.connections)

    def cut(self) -> None:
        """Drops all connections, with whatever is being said on them."""
        self.should_exit = self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Idle connections are closed at once; clients that do not read what is left for them are not waited for.
        limit = asyncio.get_running_loop().call_later(self.last_words_s, self.cut)
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are StopOnSignal's: uvicorn would raise them again at the end, and the exit status not be 0."""
        yield


class StopOnSignal:
    """SIGTERM and SIGINT: before there is a server they end the start; then the first one drains it, and the second one
    drops whoever is left."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._server: Server | None = None
        self._draining: asyncio.Task[None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)

    async def serve(self, server: Server, listener: socket.socket) -> None:
        self._server = server
        # What start-up made stays; the collector need not look at it again between two tokens.
        gc.collect()
        gc.freeze()
        logger.info("Connected")
        await server.serve(sockets=[listener])
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.gather(self._draining, return_exceptions=True)

    def _stop(self) -> None:
        if self._server is None:
            assert self._task is not None
            self._task.cancel()
        elif self._draining is None:
            logger.info("signal received, starting graceful shutdown")
            self._draining = asyncio.create_task(self._server.drain(), name="drain")
        else:
            logger.warning(
                "second signal received, dropping %d connections", len(self._server.server_state.connections)
            )
            self._server.cut()


def uvicorn_config(app: FastAPI, limits: ConnectionLimits, hits: LimitHits) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=partial(Connection, limits=limits, hits=hits),  # type: ignore[arg-type]  # it is called, nothing else
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # whose word about an address counts is `--trusted-proxy`'s matter
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
