"""The HTTP server and its graceful stop: accepted requests finish, within a time limit, and new requests get 503."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from text_generation_common.tasks import cancelled
from text_generation_router.http.accepting import SharedListener, SharedPlace
from text_generation_router.http.closing import CLOSE
from text_generation_router.http.dialects import ErrorDialects
from text_generation_router.http.gate import Gate
from text_generation_router.http.limits import ConnectionLimits, LimitHits
from text_generation_router.http.protocol import Connection
from text_generation_router.http.request_log import RefusalLog
from text_generation_router.http.room import ConnectionRoom
from text_generation_router.offload.malloc import give_back_memory

# Gives memory back when a crowd of connections has gone. A connection's objects refer to each other, so only Python's
# garbage collector frees them. The collector runs when many new objects have been made, and a server that has become
# quiet makes few.

# Connections that are a crowd: each takes about 30 KB while it has a request.
CROWD = 256


class ConnectionPeaks:
    """Notices that most of many connections have gone."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self._most = 0  # most connections since memory was last given back

    def note(self, num_connections: int) -> None:
        """Notes the number of open connections. Calls `give_back` when three quarters of a crowd have gone."""
        self._most = max(self._most, num_connections)
        if self._most >= CROWD and num_connections <= self._most // 4:
            self._most = num_connections
            self._give_back()


logger = logging.getLogger(__name__)

# Seconds that the server keeps an idle connection: longer than clients usually do, so that no client writes to a
# connection that is being closed.
KEEP_ALIVE_S = 75
# Seconds at the end of the stop for the last bytes of ended requests to reach their clients.
FLUSH_S = 5.0
POLL_S = 0.05
# New objects after which Python looks for cycles among them. A step of 256 streams makes more than the default, 700.
YOUNG_OBJECTS = 10_000


class OtherServers(Protocol):
    """Other processes that accept connections on the same listening socket."""

    async def take_over(self) -> bool:
        """Says that this server stops. Returns whether others accept connections from now on."""

    @property
    def are_ending(self) -> bool:
        """Whether all servers stop."""


class Server(uvicorn.Server):
    """The HTTP server. `end_streams` ends every unfinished generation; `drain` calls it after `patience_s` seconds.

    `on_listening` is called once the server accepts connections. `others` and `place`: None if no other server has the
    socket.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gate: Gate,
        end_streams: Callable[[], Awaitable[None]],
        patience_s: float,
        on_listening: Callable[[], None] = lambda: None,
        others: OtherServers | None = None,
        place: SharedPlace | None = None,
    ) -> None:
        super().__init__(config)
        self._place = place
        self._shared: SharedListener | None = None
        self._others = others
        self._on_listening = on_listening
        self._gate = gate
        self._end_streams = end_streams
        self._patience_s = patience_s
        self.flush_s = FLUSH_S
        self._peaks = ConnectionPeaks(self._give_back_memory)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._place is None:
            await super().startup(sockets)
        else:
            assert sockets is not None
            self._start_shared(sockets[0], self._place)
        self._on_listening()

    def _start_shared(self, listener: socket.socket, place: SharedPlace) -> None:
        """In place of uvicorn's start, whose servers accept all connections that wait."""
        make: Any = self.config.http_protocol_class
        connection = partial(make, config=self.config, server_state=self.server_state, app_state={})
        self._shared = SharedListener(listener, connection, lambda: len(self.server_state.connections), place)
        self._shared.listen(self.config.backlog)
        self.servers = [self._shared]  # type: ignore[list-item]  # uvicorn only closes them
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this ten times a second."""
        self._peaks.note(len(self.server_state.connections))
        if self._shared is not None:
            self._shared.note()
        return await super().on_tick(counter)

    def _give_back_memory(self) -> None:
        gc.collect()
        asyncio.get_running_loop().run_in_executor(None, give_back_memory)

    def stop(self) -> None:
        """Stops without waiting. To be called when the engine has failed, and with it every request."""
        self._gate.shut()
        self.should_exit = True

    async def drain(self) -> None:
        """Waits until all accepted requests have ended, then stops. New requests are answered 503 meanwhile; if other
        servers accept connections, all requests of the present connections are answered."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._patience_s
        try:
            if self._others is not None and await self._others.take_over():
                await self._leave(self._others, until_s)
            self._gate.shut()
            if not await self._gate.is_empty_within(max(until_s - loop.time(), 0.0)):
                logger.warning(
                    "%d requests did not finish within %g s and are ended", self._gate.num_unfinished, self._patience_s
                )
                await self._end_streams()
                await self._gate.is_empty_within(self.flush_s)
            while self._is_unread() and loop.time() < until_s:
                await asyncio.sleep(POLL_S)
        finally:
            self.should_exit = True

    async def _leave(self, others: OtherServers, until_s: float) -> None:
        """Accepts no more connections, asks the clients of the present ones to close them after their next answers, and
        waits until all are closed, or for `until_s`. What the kernel has queued goes to the other servers: their copies
        of the socket stay open."""
        for server in self.servers:
            server.close()
        self.config.encoded_headers.append(CLOSE)  # uvicorn makes the default headers of these, each second
        self.server_state.default_headers = [*self.server_state.default_headers, CLOSE]
        for connection in self.server_state.connections:
            assert isinstance(connection, Connection)
            connection.close_after_answers()
        loop = asyncio.get_running_loop()
        while self.server_state.connections and not others.are_ending and loop.time() < until_s:
            await asyncio.sleep(POLL_S)

    def _is_unread(self) -> bool:
        """Whether a connection has unsent bytes. If a client never reads its bytes, the write deadline ends the
        connection.
        """
        return any(connection.transport.get_write_buffer_size() for connection in self.server_state.connections)

    def abort(self) -> None:
        """Stops at once and aborts all connections, also in the middle of an answer."""
        self.should_exit = self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn closes idle connections at once. Connections whose clients have not read their answers by the limit
        # are aborted.
        limit = asyncio.get_running_loop().call_later(self.flush_s, self.abort)
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to StopOnSignal. uvicorn would raise them again at the end, and the exit status would not be
        zero.
        """
        yield


class StopOnSignal:
    """Handles SIGTERM and SIGINT. A signal during the start ends the start. Later the first signal drains the server,
    and the second signal drops all connections.
    """

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._server: Server | None = None
        self._draining: asyncio.Task[None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)

    async def serve(self, server: Server, listener: socket.socket) -> None:
        self._server = server
        # Objects that exist after the start live as long as the server. They are frozen, so that later collections skip
        # them.
        usual = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        logger.info("Connected")
        try:
            await server.serve(sockets=[listener])
        finally:
            gc.set_threshold(*usual)
            gc.unfreeze()  # Python's last collection would skip frozen objects too, and libraries report them as leaks.
        if self._draining is not None:
            await cancelled(self._draining)

    def _stop(self) -> None:
        if self._server is None:
            assert self._task is not None
            self._task.cancel()
        elif self._draining is None:
            logger.info("signal received, starting graceful shutdown")
            self._draining = asyncio.create_task(self._server.drain(), name="drain")
        else:
            logger.warning("second signal received, closing %d connections", len(self._server.server_state.connections))
            self._server.abort()


def uvicorn_config(
    app: Starlette,
    limits: ConnectionLimits,
    hits: LimitHits,
    at_once: Mapping[bytes, ASGIApp] = MappingProxyType({}),
    dialects: ErrorDialects | None = None,
    num_elsewhere: Callable[[], int] = lambda: 0,
) -> uvicorn.Config:
    """`at_once`: see `Connection`; `num_elsewhere`: see `ConnectionRoom`."""
    connection = partial(
        Connection,
        limits=limits,
        hits=hits,
        at_once=at_once,
        dialects=dialects or ErrorDialects(is_tgis=False),
        refusals=RefusalLog(),
        room=ConnectionRoom(limits.max_connections, num_elsewhere),
    )
    return uvicorn.Config(
        app,
        http=connection,  # type: ignore[arg-type]  # uvicorn only calls it
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # RefusalLog logs refusals, and no more of them than it should
        access_log=False,
        proxy_headers=False,  # http/peer.py reads forwarding headers, as --trusted-proxy says
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
