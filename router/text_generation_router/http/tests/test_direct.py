"""Events that are written past ASGI, over loopback on both event loops (asyncio and uvloop)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import uvloop
from starlette.applications import Starlette
from uvicorn.server import ServerState

from text_generation_router.http.disconnect import end_at_half_close
from text_generation_router.http.limits import ConnectionLimits, LimitHits
from text_generation_router.http.server import uvicorn_config
from text_generation_router.http.sse import DirectWriter, EventStream
from text_generation_router.metrics.metrics import Metrics

PATIENCE_S = 60
EVENT = b"data: " + b"x" * 2**14 + b"\n\n"
POST = b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
loops = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


class App:
    """An application whose streams have the event "first", the events that a test writes, and the event "last"."""

    def __init__(self, shows_writer: bool) -> None:
        self.writer = DirectWriter()
        self.started, self.may_end = asyncio.Event(), asyncio.Event()
        self._shows_writer = shows_writer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        end_at_half_close(scope)
        await receive()
        writer = self.writer if self._shows_writer else None
        await EventStream(self._events(), {}, writer=writer)(scope, receive, send)

    async def _events(self) -> AsyncIterator[bytes]:
        yield b"data: first\n\n"
        self.started.set()
        await self.may_end.wait()
        yield b"data: last\n\n"


@asynccontextmanager
async def connected(app: App) -> AsyncIterator[asyncio.StreamReader]:
    config = uvicorn_config(cast(Starlette, app), ConnectionLimits(9, 100, PATIENCE_S), LimitHits(Metrics()))
    config.load()

    def connection() -> asyncio.Protocol:
        return config.http_protocol_class(config=config, server_state=ServerState(), app_state={})  # type: ignore

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=2**12)
    writer.write(POST)
    await app.started.wait()
    try:
        yield reader
    finally:
        writer.transport.abort()
        server.close()


def run(loop: Callable[[], asyncio.AbstractEventLoop], test: Callable[[], Awaitable[Any]]) -> Any:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(asyncio.wait_for(test(), PATIENCE_S))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@loops
def test_a_written_event_is_a_chunk_between_the_chunks_that_are_sent(loop: Any) -> None:
    async def test() -> None:
        app = App(shows_writer=True)
        async with connected(app) as reader:
            app.writer.write([b"data: direct\n\n", b"data: 2\n\n"])
            app.may_end.set()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"transfer-encoding: chunked" in head
            first, direct = b"d\r\ndata: first\n\n\r\n", b"e\r\ndata: direct\n\n\r\n9\r\ndata: 2\n\n\r\n"
            last = b"c\r\ndata: last\n\n\r\n"
            assert body == first + direct + last + b"0\r\n\r\n"
            assert not app.writer.is_open, "the response is complete"

    run(loop, test)


@loops
def test_the_writer_is_closed_while_the_client_does_not_read(loop: Any) -> None:
    async def test() -> None:
        app = App(shows_writer=True)
        async with connected(app) as reader:
            written = 0
            while app.writer.is_open:
                app.writer.write([EVENT])
                written += 1
                await asyncio.sleep(0)
                assert written < 10_000, "a buffer without a bound"
            received = 0
            while not app.writer.is_open:
                received += (await reader.read(2**16)).count(b"data: x")
            app.may_end.set()
            received += (await reader.read()).count(b"data: x")
            assert received == written

    run(loop, test)


@loops
def test_the_writer_is_closed_when_the_client_has_left(loop: Any) -> None:
    async def test() -> None:
        app = App(shows_writer=True)
        async with connected(app):
            assert app.writer.is_open
        await until(lambda: not app.writer.is_open)

    run(loop, test)


@loops
def test_a_writer_without_a_response_is_closed(loop: Any) -> None:
    async def test() -> None:
        app = App(shows_writer=False)
        async with connected(app):
            assert not app.writer.is_open

    run(loop, test)


async def test_a_writer_is_closed_behind_another_server() -> None:
    writer = DirectWriter()
    writer.start({"type": "http"})
    assert not writer.is_open


async def test_written_events_count_as_signs_of_life() -> None:
    sent: list[bytes] = []
    writer = DirectWriter()

    async def events() -> AsyncIterator[bytes]:
        for _ in range(20):
            writer.note_sent()
            await asyncio.sleep(0.01)
        yield b"data: last\n\n"

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    await EventStream(events(), {}, writer=writer, keep_alive_s=0.15)({"type": "http"}, receive, send)  # type: ignore[arg-type]
    assert b":\n\n" not in sent
