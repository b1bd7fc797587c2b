"""Requests that are answered in the callback that reads them, over a transport that keeps what is written."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from uvicorn.server import ServerState

from text_generation_router.http.limits import ConnectionLimits, LimitHits
from text_generation_router.http.protocol import Connection
from text_generation_router.http.server import uvicorn_config
from text_generation_router.metrics.metrics import Limit, Metrics

GET = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class KeepingTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_aborted = False
        self.on_write: Callable[[], None] = lambda: None

    def write(self, data: Any) -> None:
        self.written += data
        self.on_write()

    def is_closing(self) -> bool:
        return self.is_aborted

    def close(self) -> None:
        self.is_aborted = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class Line:
    """A connection whose application answers GET /live at once, and everything else in a task, with status 203."""

    def __init__(self) -> None:
        self.metrics, self.transport = Metrics(), KeepingTransport()
        http = uvicorn_config(
            cast(Starlette, Response(status_code=203)),
            ConnectionLimits(9, 9, 9.0),
            LimitHits(self.metrics),
            {b"/live": Response()},
        )
        http.load()
        make = cast(Callable[..., Connection], http.http_protocol_class)
        self.connection = make(http, ServerState(), {}, asyncio.get_running_loop())
        self.connection.connection_made(self.transport)

    def receive(self, data: bytes) -> bytes:
        """What is written at once in answer to `data`."""
        before = len(self.transport.written)
        self.connection.data_received(data)
        return self.transport.written[before:]


@pytest.fixture
def line() -> AbstractAsyncContextManager[Line]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Line]:
        yield (line := Line())
        line.connection.connection_lost(None)

    return opened()


async def some_turns() -> None:
    for _ in range(9):
        await asyncio.sleep(0)


async def test_each_request_is_answered_in_the_callback_that_reads_it(line: Line) -> None:
    assert [line.receive(GET) for _ in range(3)] == [ANSWER] * 3
    assert line.receive(GET.replace(b"GET", b"HEAD")) == ANSWER
    assert line.receive(GET[:20]) == b"" and line.receive(GET[20:]) == ANSWER
    closed = line.receive(GET.replace(b"host", b"connection: close\r\nhost"))
    assert b"connection: close\r\n" in closed and line.transport.is_closing()


@pytest.mark.parametrize("other", [b"POST /live HTTP", b"GET /live?x HTTP", b"GET /live/ HTTP", b"GET /metrics HTTP"])
async def test_other_requests_are_answered_by_the_application(line: Line, other: bytes) -> None:
    assert line.receive(GET.replace(b"GET /live HTTP", other)) == b""
    await some_turns()
    assert line.transport.written.startswith(b"HTTP/1.1 203 ")


async def test_of_many_requests_in_one_piece_one_is_answered_at_once(line: Line) -> None:
    """All the others would hold the event loop as well."""
    assert line.receive(GET * 3) == ANSWER
    await some_turns()
    assert line.transport.written == 3 * ANSWER
    line.transport.written = b""
    line.receive(GET * 50)
    await some_turns()
    hits = line.metrics.registry.get_sample_value("tgi_router_limit_hits_total", {"limit": Limit.PIPELINE.value})
    assert hits == 1 and line.transport.is_closing()
    answers, refusal = line.transport.written.split(b"HTTP/1.1 400 ")
    assert answers == 9 * ANSWER and b"at most 8 requests may be sent ahead" in refusal


async def test_a_client_that_does_not_read_gets_its_answer_when_it_reads(line: Line) -> None:
    line.connection.pause_writing()
    assert line.receive(GET) == b""
    line.connection.resume_writing()
    await some_turns()
    assert line.transport.written == ANSWER


async def test_a_client_that_stops_reading_within_an_answer_is_disconnected(line: Line) -> None:
    line.transport.on_write = line.connection.pause_writing
    line.receive(GET)
    assert line.transport.is_aborted
