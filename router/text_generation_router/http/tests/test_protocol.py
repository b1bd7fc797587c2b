"""The limits of a connection, tested over loopback on both event loops (asyncio and uvloop)."""

import asyncio
import inspect
import json
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.responses import Response

from text_generation_common.tests.slowness import slowness
from text_generation_router.http import protocol, request_log
from text_generation_router.http.closing import ClosingResponse
from text_generation_router.http.cycles import until_half_closed
from text_generation_router.http.disconnect import end_at_half_close
from text_generation_router.http.gate import Gate
from text_generation_router.http.limits import SEND_BUFFER_BYTES, ConnectionLimits, LimitHits
from text_generation_router.http.server import Server, uvicorn_config
from text_generation_router.metrics.metrics import Limit, Metrics

PATIENCE_S = 60
LARGE = b"large" * 2_000_000
GET = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"
ONCE = GET.replace(b"host", b"connection: close\r\nhost")
loops = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


class App:
    """An application that answers `ok`; /endless streams until the client disconnects, /stream when `may_end` is set,
    /generate waits as if it generated text, /unread answers without reading the body, /closing refuses it, /large sends
    10 MB at once."""

    def __init__(self) -> None:
        self.requests = 0
        self.received = 0
        self.gone = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        if scope["path"] == "/closing":
            return await ClosingResponse("refused", 413)(scope, receive, send)
        more = scope["path"] not in ("/unread", "/endless")
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return self.gone.set()
            self.received += len(message.get("body", b""))
            more = message.get("more_body", False)
        if scope["path"] == "/generate":
            end_at_half_close(scope)
            await receive()
            self.gone.set()
            return await Response(status_code=499)(scope, receive, send)
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first, ", "more_body": True})
            await self.may_end.wait()
            return await send({"type": "http.response.body", "body": b"last"})
        if scope["path"] == "/large":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            return await send({"type": "http.response.body", "body": LARGE})
        headers = [] if scope["path"] == "/endless" else [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/endless":
            await self._stream(receive, send)
        await send({"type": "http.response.body", "body": b"ok"})

    async def _stream(self, receive: Any, send: Any) -> None:
        async def write() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
                await asyncio.sleep(0)

        writing = asyncio.create_task(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        self.gone.set()


class Edge:
    def __init__(self, app: App, server: uvicorn.Server, address: tuple[str, int], metrics: Metrics) -> None:
        self.app, self.server, self.address, self._metrics = app, server, address, metrics
        self._writers: list[asyncio.StreamWriter] = []

    def hits(self, limit: Limit) -> float:
        value = self._metrics.registry.get_sample_value("tgi_router_limit_hits_total", {"limit": limit.value})
        assert value is not None
        return value

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    async def open(self, host: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection from the address `host`, which is closed at the end of the test."""
        reader, writer = await asyncio.open_connection(*self.address, local_addr=(host, 0))
        self._writers.append(writer)
        return reader, writer

    async def ask(self, content: bytes, host: str = "127.0.0.1", ends: bool = False) -> bytes:
        """Sends `content` on a new connection from `host`, and if it `ends` nothing more. Returns all bytes of the
        answers, until the connection is closed or reset."""
        reader, writer = await self.open(host)
        writer.write(content)
        if ends:
            writer.write_eof()
        answer = b""
        with suppress(ConnectionResetError):
            while part := await reader.read(2**16):
                answer += part
        return answer

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.close()


@asynccontextmanager
async def serving(**changes: Any) -> AsyncIterator[Edge]:
    values: dict[str, Any] = {"max_connections": 50, "payload_bytes": 100_000, "write_s": PATIENCE_S}
    metrics, app = Metrics(), App()
    config = uvicorn_config(
        cast(Starlette, app), ConnectionLimits(**values | changes), LimitHits(metrics), {b"/live": Response()}
    )
    server = Server(config, Gate(), end_streams=asyncio.Event().wait, patience_s=0)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.bind(("127.0.0.1", 0))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    address = listener.getsockname()
    while not server.started:
        await asyncio.sleep(0.01)
    edge = Edge(app, server, address, metrics)
    try:
        yield edge
    finally:
        edge.close()
        server.abort()
        await running


def run(loop: Callable[[], asyncio.AbstractEventLoop], test: Callable[[Edge], Awaitable[Any]], **limits: Any) -> Any:
    async def served() -> Any:
        failures: list[Any] = []  # errors in callbacks, such as a write after the end of the stream
        asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
        async with asyncio.timeout(PATIENCE_S), serving(**limits) as edge:
            result = await test(edge)
        assert not failures
        return result

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(served())


def served(**limits: Any) -> Callable[[Callable[..., Awaitable[None]]], Any]:
    """Makes a coroutine a test on both event loops. It gets the edge of a server with these limits."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Any:
        def on_loop(loop: Any, **values: Any) -> None:
            run(loop, lambda edge: test(edge, **values), **limits)

        names = ["loop", *list(inspect.signature(test).parameters)[1:]]
        on_loop.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])
        on_loop.__dict__.update(vars(test))  # the marks of pytest
        on_loop.__name__, on_loop.__doc__ = test.__name__, test.__doc__
        return loops(on_loop)

    return decorate


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def post(path: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"POST /%b HTTP/1.1" % path, b"host: x", *headers, b"", b""])


@served()
async def test_a_connection_serves_many_requests(edge: Edge) -> None:
    reader, writer = await edge.open()
    for _ in range(3):
        writer.write(post(b"x", b"content-length: 3") + b"abc")
        assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
    writer.write(GET.replace(b"host", b"connection: close\r\nhost"))
    assert (await reader.read()).endswith(b"ok")


@served()
async def test_a_connection_gets_many_answers_at_once(edge: Edge) -> None:
    reader, writer = await edge.open()
    live = GET.replace(b"/x", b"/live")
    for _ in range(3):
        writer.write(live)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.write(live.replace(b"host", b"connection: close\r\nhost"))
    answer, requests = await reader.read(), edge.app.requests
    assert answer.endswith(b"content-length: 0\r\nconnection: close\r\n\r\n") and requests == 0


@served(headers_s=0.2)
async def test_headers_that_do_not_end_are_a_timeout(edge: Edge) -> None:
    answers = await asyncio.gather(edge.ask(b"GET /x HTTP/1.1\r\nho"), edge.ask(b""), edge.ask(b"\r\n"))
    half, silent, blank, hits = *answers, edge.hits(Limit.HEADER_TIME)
    assert half.startswith(b"HTTP/1.1 408 Request Timeout\r\n") and b'"error_type":"timeout"' in half
    assert (silent, blank, hits) == (b"", b"", 3)


@served(headers_s=0.6)
async def test_a_second_request_has_its_own_time(edge: Edge) -> None:
    reader, writer = await edge.open()
    writer.write(GET)
    await reader.readuntil(b"ok")
    await asyncio.sleep(0.8)  # idle for more seconds than headers may take
    writer.write(GET)
    await reader.readuntil(b"ok")
    writer.write(b"G")
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


@served(headers_s=0.2)
async def test_empty_lines_do_not_keep_an_idle_connection(edge: Edge) -> None:
    reader, writer = await edge.open()
    writer.write(GET)
    await reader.readuntil(b"ok")
    writer.write(b"\r\n")
    assert await reader.read() == b""


@served()
@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["half", "whole"])
async def test_large_headers_are_refused(edge: Edge, end) -> None:
    content = b"GET /x HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 600_000 + end
    answer, requests, hits = await edge.ask(content), edge.app.requests, edge.hits(Limit.HEADER_SIZE)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"connection: close" in answer
    assert b'"error_type":"headers_too_large"' in answer
    assert (requests, hits) == (0, 1)


@served()
async def test_headers_below_the_limit_pass(edge: Edge) -> None:
    assert (
        await edge.ask(b"GET /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: " + b"a" * 65_000 + b"\r\n\r\n")
    ).endswith(b"ok")


@served(body_s=0.2)
async def test_a_body_that_does_not_end_is_a_timeout(edge: Edge) -> None:
    answer = await edge.ask(post(b"x", b"content-length: 5") + b"abc")
    await edge.app.gone.wait()
    answer, hits = answer, edge.hits(Limit.BODY_TIME)
    assert answer.startswith(b"HTTP/1.1 408 ") and hits == 1


@served()
async def test_the_rest_of_a_body_after_its_answer_does_not_end_the_connection(edge: Edge) -> None:
    reader, writer = await edge.open()
    writer.write(post(b"unread", b"content-length: 6") + b"abc")
    await reader.readuntil(b"ok")
    writer.write(b"def" + post(b"x", b"content-length: 1", b"connection: close") + b"z")
    answer, received = await reader.read(), edge.app.received
    assert answer.endswith(b"ok") and received == 1


@served()
async def test_an_answered_request_is_not_read_for_ever(edge: Edge) -> None:
    reader, writer = await edge.open()
    writer.write(post(b"unread", b"content-length: 50000000"))
    await reader.readuntil(b"ok")
    with pytest.raises(ConnectionError):
        while True:
            writer.write(b"x" * 50_000)
            await writer.drain()
            await asyncio.sleep(0)
    await until(lambda: edge.num_connections == 0)
    assert edge.hits(Limit.BODY_SIZE) == 1


@served()
@pytest.mark.parametrize("endless", [b"t: x\r\n" * 1000, b"t: " + b"x" * 6000], ids=["lines", "one line"])
async def test_endless_trailers_after_a_body_are_neither_kept_nor_read(edge: Edge, endless) -> None:
    _, writer = await edge.open()
    writer.write(post(b"x", b"transfer-encoding: chunked") + b"1\r\na\r\n0\r\n")
    sent = 0
    with pytest.raises(ConnectionError):
        while sent < 50_000_000:
            writer.write(endless)
            await writer.drain()
            sent += len(endless)
            await asyncio.sleep(0)
    await until(lambda: edge.num_connections == 0)
    hits, sent = edge.hits(Limit.HEADER_SIZE), sent
    assert hits == 1 and sent < 50_000_000


CHUNKED = post(b"x", b"transfer-encoding: chunked", b"connection: close")
LAST_CHUNK = b"0\r\nt: x\r\n\r\n"


@served()
@pytest.mark.parametrize(
    "pieces", [b"1\r\na\r\n" * 512, (b"40\r\n" + b"a" * 64 + b"\r\n") * 1_000], ids=["few", "not tiny"]
)
async def test_a_body_in_small_pieces_is_read(edge: Edge, pieces) -> None:
    answer = await edge.ask(CHUNKED + pieces + LAST_CHUNK)
    answer, received = answer, edge.app.received
    assert answer.endswith(b"ok") and received == pieces.count(b"a")


@served()
async def test_a_body_in_very_many_tiny_pieces_is_refused_with_one_answer(edge: Edge) -> None:
    answers = [await edge.ask(CHUNKED + b"1\r\na\r\n" * count + LAST_CHUNK) for count in (600, 50_000)]
    answers, hits = answers, edge.hits(Limit.CHUNKS)
    assert hits == 2
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
        assert b"many chunks of less than 64 bytes" in answer


def is_full(answer: bytes) -> bool:
    head = answer.partition(b"\r\n\r\n")[0]
    return head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in head and head.count(b"connection: close") == 1


@served(max_connections=2, beyond_s=0.2)
@pytest.mark.parametrize("half", [b"", b"GET /x HT", post(b"x", b"content-length: 3") + b"a"])
async def test_one_address_may_have_all_connections_and_then_only_learns_whether_the_server_lives(
    edge: Edge, half
) -> None:
    writers = [(await edge.open())[1] for _ in range(2)]
    for writer in writers:
        writer.write(half)
    await until(lambda: edge.num_connections == 2)
    for asked in (b"", GET, post(b"x", b"content-length: 9000"), GET[:9]):
        assert is_full(await edge.ask(asked))
    live = await edge.ask(GET.replace(b"/x", b"/live"))
    assert live.startswith(b"HTTP/1.1 200 OK\r\n") and b"connection: close" in live
    writers[0].close()
    await until(lambda: edge.num_connections == 1)
    assert (await edge.ask(ONCE)).endswith(b"ok")
    assert edge.hits(Limit.CONNECTIONS) == 5


@served(max_connections=5)
@pytest.mark.parametrize("half", [b"", b"GET /x HT", post(b"x", b"content-length: 3") + b"a", GET])
async def test_connections_without_a_whole_request_make_room_for_another_address(edge: Edge, half) -> None:
    """The longest wait ends first, with an answer if a request had begun; requests that are answered stay."""

    stream, writer = await edge.open()
    writer.write(GET.replace(b"/x", b"/stream"))
    await stream.readuntil(b"first, ")
    crowd = []
    for _ in range(4):
        reader, writer = await edge.open()
        writer.write(half)
        crowd.append(reader)
        await until(lambda: edge.num_connections == len(crowd) + 1)
        if half == GET:
            await reader.readuntil(b"ok")  # an idle connection
    if half.startswith(b"POST"):
        await until(lambda: edge.app.requests == 5)
    for other in crowd[:2]:
        reader, writer = await edge.open("127.0.0.2")
        ended = await other.read()
        assert is_full(ended) if half not in (b"", GET) else ended == b""
        writer.write(GET)
        await reader.readuntil(b"ok")  # and stays open, so that it counts
    assert is_full(await edge.ask(GET, "127.0.0.2")), "both addresses have two connections that wait"
    assert not any(reader.at_eof() for reader in crowd[2:])
    edge.app.may_end.set()
    await stream.readuntil(b"0\r\n\r\n")


@served(write_s=0.3)
async def test_a_client_that_never_reads_loses_its_stream(edge: Edge) -> None:
    with socket.create_connection(edge.address) as client:
        client.sendall(GET.replace(b"/x", b"/endless"))
        await edge.app.gone.wait()
        await until(lambda: edge.num_connections == 0)
    assert edge.hits(Limit.WRITE_TIME) == 1


@loops
def test_bytes_that_a_client_does_not_read_do_not_pile_up(loop):
    async def test(edge: Edge) -> int:
        with socket.create_connection(edge.address) as client:
            client.sendall(GET.replace(b"/x", b"/endless"))
            await until(lambda: any(one.flow.write_paused for one in edge.server.server_state.connections))
            await asyncio.sleep(0.1)
            [connection] = edge.server.server_state.connections
            return connection.transport.get_write_buffer_size()

    assert run(loop, test) <= 2**16 + 8192


@loops
def test_a_client_that_reads_slowly_gets_all_of_a_large_answer(loop):
    """Writing is paused from the first byte to nearly the last, for longer than the write deadline. If this process,
    which has both ends, stands still as long as the deadline, the client is not slow but silent, and asks again."""
    slow = slowness().clock
    pause_s, write_s = 0.03 * slow, 0.4 * slow

    async def test(edge: Edge) -> tuple[bytes, int]:
        clock, longest_s = asyncio.get_running_loop().time, inf
        while longest_s > write_s / 3:
            reader, writer = await edge.open()
            writer.write(GET.replace(b"/x", b"/large").replace(b"host", b"connection: close\r\nhost"))
            answer, longest_s, read_s, hits = b"", 0.0, clock(), edge.hits(Limit.WRITE_TIME)
            with suppress(ConnectionResetError):
                while part := await reader.read(2**18):
                    answer += part
                    await asyncio.sleep(pause_s)
                    longest_s, read_s = max(longest_s, clock() - read_s), clock()
            longest_s = max(longest_s, clock() - read_s)
        return answer, edge.hits(Limit.WRITE_TIME) - hits

    answer, hits = run(loop, test, write_s=write_s)
    assert LARGE in answer and answer.endswith(b"0\r\n\r\n") and hits == 0


@served(write_s=0.3)
async def test_an_answer_left_unread_does_not_keep_its_connection(edge: Edge) -> None:
    """The unread bytes exceed the kernel's buffers. Writing never pauses again, so only the write deadline ends the
    wait."""

    with socket.create_connection(edge.address) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(GET.replace(b"/x", b"/endless"))
        await until(lambda: any(one.flow.write_paused for one in edge.server.server_state.connections))
        [connection] = edge.server.server_state.connections
        connection.transport.close()  # uvicorn's way to close, which waits for the buffer
        await until(lambda: edge.num_connections == 0)
    assert edge.hits(Limit.WRITE_TIME) == 1


@served()
@pytest.mark.parametrize("ends", [False, True])
async def test_requests_sent_ahead_are_bounded_and_those_within_the_bound_are_answered(edge: Edge, ends) -> None:
    answer, hits = await edge.ask(GET * 1000, ends=ends), edge.hits(Limit.PIPELINE)
    answers, _, refusal = answer.partition(b"HTTP/1.1 400 ")
    assert (answers.count(b"\r\n\r\nok"), hits) == (8, 1)
    assert b"at most 8 requests may be sent ahead" in refusal and refusal.endswith(b"}")


@served(headers_s=0.2)
@pytest.mark.parametrize("path", [b"/x", b"/stream"])
@pytest.mark.parametrize("last", [b"\x16\x03\x01", b"GET /x HTTP/1.1\r\nhost", b"GET /\xff HTTP/1.1\r\n\r\n"])
async def test_requests_before_bytes_that_are_not_http_get_their_answers(edge: Edge, path, last) -> None:
    reader, writer = await edge.open()
    writer.write(GET.replace(b"/x", path) * 3)
    await reader.readuntil(b"HTTP/1.1 200 OK")
    writer.write(last)
    await until(lambda: edge.num_connections == 1)
    edge.app.may_end.set()
    answer = await reader.read()
    answers, _, refusal = answer.partition(b"HTTP/1.1 4")
    assert answers.count(b"last" if path == b"/stream" else b"\r\n\r\nok") == 3
    assert refusal.startswith((b"00 ", b"08 ")) and refusal.endswith(b"}")


@served()
async def test_a_client_of_http_1_0_gets_the_bytes_of_a_stream_without_the_sizes_of_chunks(edge: Edge) -> None:
    edge.app.may_end.set()
    streams = [await edge.ask(b"GET /stream HTTP/1.0\r\n\r\n"), await edge.ask(b"GET /large HTTP/1.0\r\n\r\n")]
    for answer, body in zip(
        ([*streams, await edge.ask(b"GET /x HTTP/1.0\r\n\r\n")]), (b"first, last", LARGE, b"ok"), strict=True
    ):
        head, _, content = answer.partition(b"\r\n\r\n")
        assert content == body and b"transfer-encoding" not in head.lower() and b"connection: close" in head


@served()
@pytest.mark.parametrize("path", [b"x", b"stream", b"large"])
async def test_a_client_that_has_closed_its_sending_side_gets_whole_answers(edge: Edge, path) -> None:
    edge.app.may_end.set()
    first, second, *more = (await edge.ask(GET + post(path, b"content-length: 3") + b"abc", ends=True)).split(
        b"HTTP/1.1 "
    )[1:]
    assert first.endswith(b"ok") and second.startswith(b"200 ") and not more
    assert second.endswith({b"x": b"ok", b"stream": b"last\r\n0\r\n\r\n", b"large": b"0\r\n\r\n"}[path])


@served()
@pytest.mark.parametrize(
    "half", [b"GET /x HT", GET[:-2], post(b"x", b"content-length: 9") + b"abc", post(b"x", b"content-length: 9")]
)
@pytest.mark.parametrize("before", [b"", GET])
async def test_a_request_that_its_client_breaks_off_gets_a_status(edge: Edge, half, before) -> None:
    answer = await edge.ask(before + half, ends=True)
    assert answer.count(b"\r\n\r\nok") == len(before) // len(GET)
    assert is_invalid_request(b"HTTP/1.1 400" + answer.partition(b"HTTP/1.1 400")[2])


@loops
@pytest.mark.parametrize("path", [b"/generate", b"/endless"])
def test_a_generation_ends_when_its_client_has_closed_its_sending_side(loop, path):
    async def test(edge: Edge) -> bytes:
        answer = await edge.ask(GET.replace(b"/x", path), ends=path == b"/generate")
        await edge.app.gone.wait()
        return answer

    if path == b"/generate":
        assert run(loop, test).startswith(b"HTTP/1.1 499 ")


def test_the_body_of_a_client_that_has_left_is_not_read_where_text_is_generated():
    async def generate(scope: Any, receive: Any, send: Any) -> None:
        end_at_half_close(scope)
        await send(await receive())

    async def body() -> Any:
        return {"type": "http.request", "body": b"abc"}

    async def received(is_half_closed: bool) -> Any:
        messages: list[Any] = []

        async def send(message: Any) -> None:
            messages.append(message)

        cycle = cast(Any, SimpleNamespace(response_started=False))
        await until_half_closed(generate, cycle, lambda: is_half_closed)({"type": "http"}, body, send)
        return messages[0]["type"]

    assert asyncio.run(received(True)) == "http.disconnect"
    assert asyncio.run(received(False)) == "http.request"


@loops
def test_an_answer_before_the_end_of_its_request_is_complete_while_the_connection_lingers(loop, monkeypatch):
    monkeypatch.setattr(protocol, "LINGER_S", PATIENCE_S)

    async def test(edge: Edge) -> tuple[list[bytes], int]:
        answers = []
        closing, large = post(b"closing", b"content-length: 50000000") + b"abc", GET[:-2] + b"x: " + b"a" * 200_000
        for content in (closing, CHUNKED + b"1\r\na\r\n" * 50_000, large):
            reader, writer = await edge.open()
            writer.write(content[:50_000])
            await asyncio.sleep(0.01)
            writer.write(content[50_000:])
            answers.append(await reader.read())
        lingering = edge.num_connections
        edge.close()
        await until(lambda: edge.num_connections == 0)
        return answers, lingering

    answers, lingering = run(loop, test)
    statuses = [b"HTTP/1.1 413 ", b"HTTP/1.1 400 ", b"HTTP/1.1 431 "]
    assert [answer[:13] for answer in answers] == statuses and lingering == 3


@served()
@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"content-encoding: gzip", b"415 "),
        (b"content-encoding: identity, br", b"415 "),
        (b"transfer-encoding: gzip, chunked", b"501 "),
        (b"transfer-encoding: gzip", b"501 "),
        (b"transfer-encoding: gzip\r\ntransfer-encoding: chunked", b"501 "),
        (b"content-encoding: Identity", b"200 "),
        (b"content-encoding:", b"200 "),
        (b"transfer-encoding: Chunked", b"200 "),
    ],
)
async def test_codings_that_are_not_undone_are_refused_by_name(edge: Edge, header, status) -> None:
    length = b"" if b"transfer" in header else b"content-length: 5\r\n"
    answer = await edge.ask(post(b"x", length + header, b"connection: close") + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 " + status) and answer.count(b"HTTP/1.1") == 1
    assert (b"gzip" in answer or b"br" in answer) is not status.startswith(b"2")


@loops
@pytest.mark.parametrize(
    "body", [b"content-length: 5\r\n\r\nhello", b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("at", [None, -5, 40])
def test_a_body_is_read_although_its_client_would_speak_http2(loop, body, at):
    """As Java's client sends it, also in two parts."""
    head = post(b"x", b"connection: Upgrade, HTTP2-Settings", b"http2-settings: AAEAAEAAAAIAAAAB", b"Upgrade: h2c")[:-2]

    async def test(edge: Edge) -> tuple[bytes, int]:
        reader, writer = await edge.open()
        for part in ((head + body)[:at], (head + body)[at:] if at else b""):
            writer.write(part)
            await asyncio.sleep(0.01)
        answer = await reader.readuntil(b"ok")
        writer.write(ONCE)  # the connection goes on
        return answer + await reader.read(), edge.app.received

    answers, received = run(loop, test)
    assert answers.count(b"HTTP/1.1 200 ") == 2 and received == 5


@served()
@pytest.mark.parametrize("bad", [b"transfer-encoding: gzip\r\n\r\n", b"transfer-encoding: chunked\r\n\r\nx"])
async def test_no_100_continue_follows_the_refusal_of_a_body(edge: Edge, bad, caplog) -> None:
    answer = await edge.ask(post(b"x", b"expect: 100-continue")[:-2] + bad)
    assert answer.count(b"HTTP/1.1 ") == 1 and not [line for line in caplog.records if line.levelname == "ERROR"]


@served()
@pytest.mark.parametrize(
    ("bad", "count"), [(b"no HTTP\r\n\r\n", 2), (post(b"x", b"transfer-encoding: gzip"), 2), (GET * 40, 9)]
)
async def test_answers_are_not_lost_when_more_comes_behind_what_is_refused(edge: Edge, bad, count) -> None:
    reader, writer = await edge.open()
    for part in (GET + bad, b"more", b"and more"):
        writer.write(part)
        await asyncio.sleep(0.02)
    answers = await reader.read()
    assert answers.startswith(b"HTTP/1.1 200 ") and answers.count(b"HTTP/1.1 ") == count


@served()
async def test_a_client_that_leaves_with_a_second_request_waiting_ends_the_first(edge: Edge) -> None:
    reader, writer = await edge.open()
    writer.write(GET.replace(b"/x", b"/endless") + GET)
    await reader.read(10)
    writer.transport.abort()
    await edge.app.gone.wait()


@served()
@pytest.mark.parametrize(
    "content",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"CONNECT a.example:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://[::1/x HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\na b: c\r\n\r\n",
    ],
)
async def test_bytes_that_are_not_http_are_400_and_do_not_reach_the_application(edge: Edge, content) -> None:
    answer = await edge.ask(content)
    assert is_invalid_request(answer), answer


def is_invalid_request(answer: bytes) -> bool:
    """Whether `answer` is one complete 400 answer in JSON, and nothing else."""
    head, _, body = answer.partition(b"\r\n\r\n")
    names = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    return (
        head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        and (names[b"content-type"], names[b"connection"]) == (b"application/json", b"close")
        and int(names[b"content-length"]) == len(body)
        and json.loads(body)["error_type"] == "invalid_request"
        and json.loads(body)["error"].startswith("Invalid HTTP request: ")
    )


@served()
@pytest.mark.parametrize(
    "content",
    [
        b"GET /x\r\n\r\n",
        b"GET /x HTTP/0.9\r\nhost: x\r\n\r\n",
        b"GET /x HTTP/1.1\r\n\r\n",
        b"GET /x HTTP/1.1\r\nhost: x\r\nHost: x\r\n\r\n",
        b"GET /x HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n",
        b"POST /x HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /x HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + GET,
    ],
)
async def test_a_request_that_a_proxy_could_read_differently_is_refused(edge: Edge, content) -> None:
    answer, requests = await edge.ask(content), edge.app.requests
    assert is_invalid_request(answer), answer
    assert requests == 0


@served()
@pytest.mark.parametrize("content", [b"GET /x HTTP/1.0\r\n\r\n", b"GET /x HTTP/1.0\r\nhost: x\r\n\r\n"])
async def test_an_old_client_need_not_name_the_host(edge: Edge, content) -> None:
    assert (await edge.ask(content)).endswith(b"ok")


def test_refusals_before_a_request_is_known_are_a_line_each_up_to_a_number(caplog, monkeypatch):
    monkeypatch.setattr(request_log, "PERIOD_S", PATIENCE_S)

    async def test(edge: Edge) -> None:
        await edge.ask(post(b"x", b"transfer-encoding: gzip"))
        for _ in range(12):
            await edge.ask(b"\x16\x03\x01")
        await edge.ask(post(b"x", b"content-encoding: gzip", b"connection: close"))

    run(asyncio.new_event_loop, test)
    lines = [record for record in caplog.records if record.name != "text_generation_router.http.limits"]
    assert [line.getMessage() for line in lines] == ["Refused"] * (request_log.MAX_LINES + 2)
    assert [line.fields["status"] for line in lines] == [501, *[400] * request_log.MAX_LINES, 415]


# Parts of random requests.
LINES = (
    *(b"GET /x HTTP/1.1\r\nhost: x", b"POST /x HTTP/1.1\r\nhost: x", b"GET /live HTTP/1.0", b"POST /unread HTTP/1.0"),
    *(b"GET /x HTTP/1.1", b"OPTIONS * HTTP/1.1\r\nhost: x", b"PRI * HTTP/2.0"),
)
FIELDS = (
    *(
        b"host: x",
        b"connection: close",
        b"expect: 100-continue",
        b"connection: upgrade\r\nupgrade: h2c",
        b"x: " + b"y" * 70_000,
    ),
    *(b"content-length: 3", b"content-length: -1", b"content-length: 99999999999999999999", b"content-encoding: br"),
    *(b"transfer-encoding: chunked", b"transfer-encoding: gzip", b"transfer-encoding: chunked, gzip"),
)
CONTENTS = (
    b"", b"", b"abc", b"3\r\nabc\r\n0\r\n\r\n", b"3;a=b\r\nabc\r\n", b"ffffffffffffffffff\r\n", b"\x16\x03\x01\x02",
    b"\0",
)  # fmt: skip


def random_stream(rng: random.Random) -> bytes:
    """One to three requests, of which every second stream has a byte changed."""
    requests = [
        b"\r\n".join([rng.choice(LINES), *rng.sample(FIELDS, rng.randint(0, 3)), b"", rng.choice(CONTENTS)])
        for _ in range(rng.randint(1, 3))
    ]
    stream = bytearray(b"".join(requests))
    if rng.random() < 0.5:
        stream[rng.randrange(len(stream))] = rng.randrange(256)
    return bytes(stream)


@loops
def test_random_bytes_get_a_status_below_500_and_raise_nothing(loop, caplog):
    rng = random.Random(7)
    seen = set[bytes]()

    async def test(edge: Edge) -> bytes:
        for _ in range(600):
            stream = random_stream(rng)
            statuses = re.findall(rb"^HTTP/1\.[01] (\d+)", await edge.ask(stream, ends=True), re.MULTILINE)
            assert all(status < b"500" or status == b"501" for status in statuses), (stream, statuses)
            seen.update(statuses)
        return await edge.ask(ONCE)

    assert run(loop, test).endswith(b"ok")
    assert seen >= {b"200", b"400", b"415", b"431", b"501"}
    assert [record for record in caplog.records if record.exc_info] == []
