"""Stopping a server with real signals and real clients."""

import asyncio
import gc
import os
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from text_generation_router.errors import IncompleteGenerationError, InferenceError, UnhealthyError
from text_generation_router.http.dialects import NATIVE, ErrorDialects
from text_generation_router.http.errors import add_error_handlers
from text_generation_router.http.gate import Gate, gated
from text_generation_router.http.limits import ConnectionLimits, LimitHits
from text_generation_router.http.server import Server, StopOnSignal, uvicorn_config
from text_generation_router.http.sse import EventStream
from text_generation_router.metrics.metrics import Metrics

PATIENCE_S = 60
DIALECTS = ErrorDialects(is_tgis=False)


class Others:
    """Stands in for other fronts on the port."""

    def __init__(self) -> None:
        self.are_ending = False

    async def take_over(self) -> bool:
        return not self.are_ending


class Router:
    """A server with a few routes. Its generations end when the test sets `finish`, or fail through `fail`, as
    generations fail when the engine closes."""

    def __init__(self, patience_s: float, others: Others | None = None) -> None:
        self.gate, self.app = Gate(), Starlette()
        self.started, self.finish, self.failed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        hits = LimitHits(Metrics())
        self.app.add_route("/stream", self.stream, methods=["POST"])
        self.app.add_route("/whole", self.whole, methods=["POST"])
        self.app.add_route("/health", self.health)
        add_error_handlers(self.app, hits, DIALECTS)
        self.app.add_middleware(gated, gate=self.gate, dialects=DIALECTS)
        config = uvicorn_config(self.app, ConnectionLimits(100, 1000, 30), hits)
        self.server = Server(config, self.gate, self.fail, patience_s, others=others)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.address = self.listener.getsockname()

    async def fail(self) -> None:
        self.failed.set()

    async def stream(self, request: Request) -> Response:
        return EventStream(self._events(), {})

    async def whole(self, request: Request) -> Response:
        await self._end()
        return Response(b"complete")

    async def health(self, request: Request) -> Response:
        if self.gate.is_shut:
            raise UnhealthyError
        return Response()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        yield b"data: first\n\n"
        try:
            await self._end()
        except InferenceError as error:
            yield NATIVE.event(error)
        else:
            yield b"data: last\n\n"

    async def _end(self) -> None:
        self.started.set()
        waiting = [asyncio.create_task(event.wait()) for event in (self.finish, self.failed)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if not self.finish.is_set():
            raise IncompleteGenerationError

    async def ask(self, path: str, method: str = "POST") -> bytes:
        """Sends a request. Returns the whole answer, up to its end or the end of the connection."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        try:
            return await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def serving(patience_s: float = PATIENCE_S, others: Others | None = None) -> AsyncIterator[Router]:
    """Runs a server inside the context. After the context the server must stop by itself."""
    router = Router(patience_s, others)
    async with asyncio.timeout(PATIENCE_S):
        running = asyncio.create_task(StopOnSignal().serve(router.server, router.listener))
        while not router.server.started:
            await asyncio.sleep(0.01)
        yield router
        await running
    with socket.socket() as late:
        assert late.connect_ex(router.address) != 0


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def until_shut(router: Router) -> None:
    while not router.gate.is_shut:
        await asyncio.sleep(0.01)


async def test_running_requests_finish_and_new_ones_are_refused_by_a_server_that_listens():
    async with serving() as router:
        assert (await router.ask("/health", "GET")).startswith(b"HTTP/1.1 200 ")
        running = [asyncio.create_task(router.ask(path)) for path in ("/stream", "/whole")]
        while router.gate.num_unfinished < 2:
            await asyncio.sleep(0.01)
        terminate()
        await until_shut(router)
        refused, health = await router.ask("/whole"), await router.ask("/health", "GET")
        assert refused.startswith(b"HTTP/1.1 503 ") and b'"error_type":"unavailable"' in refused
        assert b"retry-after: 1\r\n" in refused and b"connection: close\r\n" in refused
        assert health.startswith(b"HTTP/1.1 503 ")
        assert not any(task.done() for task in running)
        router.finish.set()
        stream, whole = await asyncio.gather(*running)
        assert b"data: last\n\n" in stream and stream.endswith(b"0\r\n\r\n")
        assert whole.endswith(b"complete")
        assert not router.failed.is_set()


async def test_objects_are_frozen_and_collections_are_rare_while_the_server_runs_and_not_later():
    usual = gc.get_threshold()
    async with serving() as router:
        assert (await router.ask("/health", "GET")).startswith(b"HTTP/1.1 200 ")
        assert gc.get_freeze_count() > 0 and gc.get_threshold()[0] > usual[0]
        terminate()
    assert gc.get_freeze_count() == 0 and gc.get_threshold() == usual


async def test_what_does_not_finish_in_time_gets_a_clean_end():
    async with serving(patience_s=0.1) as router:
        running = [asyncio.create_task(router.ask(path)) for path in ("/stream", "/whole")]
        while router.gate.num_unfinished < 2:
            await asyncio.sleep(0.01)
        terminate()
        stream, whole = await asyncio.gather(*running)
        assert b'"error_type":"incomplete_generation"' in stream and stream.endswith(b"0\r\n\r\n")
        assert whole.startswith(b"HTTP/1.1 500 ") and b'"error_type":"incomplete_generation"' in whole


async def test_a_second_signal_cuts_the_streams():
    async with serving() as router:
        running = asyncio.create_task(router.ask("/stream"))
        await router.started.wait()
        terminate()
        await until_shut(router)
        terminate()
        try:
            answer = await running
        except ConnectionResetError:
            answer = b""
        assert b"last" not in answer and not answer.endswith(b"0\r\n\r\n")
        assert not router.failed.is_set()


@pytest.mark.parametrize("sent", [b"", b"POST /whole HT", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_idle_and_half_open_connections_do_not_delay_the_end(sent):
    async with serving() as router:
        reader, writer = await asyncio.open_connection(*router.address)
        writer.write(sent)
        await router.ask("/health", "GET")
        terminate()
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 " if sent.startswith(b"GET") else b"")


async def test_a_client_that_does_not_read_does_not_keep_the_server():
    async with serving(patience_s=0.3) as router:
        router.server.flush_s = 0.2

        async def flood() -> AsyncGenerator[bytes, None]:
            while True:
                yield b"data: " + b"x" * 10_000 + b"\n\n"
                await asyncio.sleep(0)

        async def endless(request: Request) -> Response:
            return EventStream(flood(), {})

        router.app.add_route("/endless", endless)
        client = socket.create_connection(router.address)
        client.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        while not any(one.flow.write_paused for one in router.server.server_state.connections):
            await asyncio.sleep(0.01)
        terminate()
    client.close()


async def test_an_answer_that_is_still_being_read_is_not_cut():
    content = b"x" * 30_000_000
    async with serving() as router:
        router.server.flush_s = 0.2

        async def large(request: Request) -> Response:
            return Response(content)

        router.app.add_route("/large", large, methods=["POST"])
        reader, writer = await asyncio.open_connection(*router.address, limit=2**10)
        writer.write(b"POST /large HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        terminate()
        await asyncio.sleep(1)
        answer = await reader.read()
    writer.close()
    assert answer == content


async def test_a_signal_during_start_ends_it():
    async def start() -> None:
        StopOnSignal()
        terminate()
        await asyncio.sleep(PATIENCE_S)

    task = asyncio.create_task(start())
    await asyncio.wait({task}, timeout=PATIENCE_S / 2)
    assert task.cancelled()


class KeptConnection:
    """A client's connection with several requests."""

    @classmethod
    async def open(cls, router: Router) -> "KeptConnection":
        connection = cls()
        connection.reader, connection.writer = await asyncio.open_connection(*router.address)
        return connection

    def send(self, path: str, method: str) -> None:
        self.writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def ask(self, path: str = "/health", method: str = "GET") -> bytes:
        """Returns the head of an answer without a body."""
        self.send(path, method)
        return await self.head()


async def test_a_server_that_leaves_others_the_port_answers_all_that_comes_on_its_connections():
    async with serving(others=Others()) as router:
        kept, waiting = await KeptConnection.open(router), await KeptConnection.open(router)
        others_copy = router.listener.dup()  # another process's copy, from which this one does not accept
        assert b"connection: close" not in await kept.ask()
        waiting.send("/whole", "POST")
        stream = asyncio.create_task(router.ask("/stream"))
        while router.gate.num_unfinished < 2:
            await asyncio.sleep(0.01)
        terminate()
        while router.server.servers[0].is_serving():
            await asyncio.sleep(0.01)
        queued = await KeptConnection.open(router)  # by the kernel, for the others
        last = await kept.ask()
        assert last.startswith(b"HTTP/1.1 200 ") and b"connection: close\r\n" in last
        assert await kept.reader.read() == b"", "the connection is closed after that answer"
        router.finish.set()
        assert b"data: last\n\n" in await stream
        whole = await waiting.head()
        assert whole.startswith(b"HTTP/1.1 200 ") and b"connection: close\r\n" in whole
        others_copy.setblocking(False)
        accepted, _ = await asyncio.get_running_loop().sock_accept(others_copy)
        queued.send("/health", "GET")
        assert b"/health" in await asyncio.get_running_loop().sock_recv(accepted, 100)
        for open_end in (accepted, others_copy, kept.writer, waiting.writer, queued.writer):
            open_end.close()


async def test_idle_connections_are_kept_until_the_patience_is_over():
    async with serving(patience_s=0.5, others=Others()) as router:
        kept = await KeptConnection.open(router)
        await kept.ask()
        began_s = asyncio.get_running_loop().time()
        terminate()
        assert await kept.reader.read() == b""
        assert asyncio.get_running_loop().time() - began_s >= 0.5
        kept.writer.close()


async def test_a_server_that_leaves_stops_at_once_when_the_others_do():
    others = Others()
    async with serving(others=others) as router:
        kept = await KeptConnection.open(router)
        await kept.ask()
        terminate()
        while router.server.servers[0].is_serving():
            await asyncio.sleep(0.01)
        others.are_ending = True
        assert await kept.reader.read() == b""
        kept.writer.close()
