"""The limits of a connection, tested over loopback on both event loops (asyncio and uvloop)."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
import uvicorn
import uvloop
from fastapi import FastAPI, Response

from text_generation_router.http.gate import Gate
from text_generation_router.http.limits import SEND_BUFFER_BYTES, ConnectionLimits, LimitHits
from text_generation_router.http.server import Server, uvicorn_config
from text_generation_router.metrics import Limit, Metrics

PATIENCE_S = 20
LARGE = b"large" * 2_000_000
GET = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"
loops = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


class App:
    """An application that answers `ok`; /endless streams until the client disconnects, /unread answers without reading
    the body, /large sends 10 MB at once.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.received = 0
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        more = scope["path"] not in ("/unread", "/endless")
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return self.gone.set()
            self.received += len(message.get("body", b""))
            more = message.get("more_body", False)
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

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection, which is closed at the end of the test."""
        reader, writer = await asyncio.open_connection(*self.address)
        self._writers.append(writer)
        return reader, writer

    async def ask(self, content: bytes) -> bytes:
        """Sends `content` on a new connection. Returns all bytes of the answers, until the connection is closed or
        reset.
        """
        reader, writer = await self.open()
        writer.write(content)
        answer = b""
        with suppress(ConnectionResetError):
            while part := await reader.read(2**16):
                answer += part
        return answer

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def serving(**changes: Any) -> AsyncIterator[Edge]:
    values: dict[str, Any] = {"max_connections": 50, "payload_bytes": 100_000, "write_s": PATIENCE_S}
    metrics, app = Metrics(), App()
    config = uvicorn_config(
        cast(FastAPI, app), ConnectionLimits(**values | changes), LimitHits(metrics), {b"/live": Response()}
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
        async with asyncio.timeout(PATIENCE_S), serving(**limits) as edge:
            return await test(edge)

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(served())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def post(path: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"POST /%b HTTP/1.1" % path, b"host: x", *headers, b"", b""])


@loops
def test_a_connection_serves_many_requests(loop):
    async def test(edge: Edge) -> bytes:
        reader, writer = await edge.open()
        for _ in range(3):
            writer.write(post(b"x", b"content-length: 3") + b"abc")
            assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
        writer.write(GET.replace(b"host", b"connection: close\r\nhost"))
        return await reader.read()

    assert run(loop, test).endswith(b"ok")


@loops
def test_a_connection_gets_many_answers_at_once(loop):
    async def test(edge: Edge) -> tuple[bytes, int]:
        reader, writer = await edge.open()
        live = GET.replace(b"/x", b"/live")
        for _ in range(3):
            writer.write(live)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(live.replace(b"host", b"connection: close\r\nhost"))
        return await reader.read(), edge.app.requests

    answer, requests = run(loop, test)
    assert answer.endswith(b"content-length: 0\r\nconnection: close\r\n\r\n") and requests == 0


@loops
def test_headers_that_do_not_end_are_a_timeout(loop):
    async def test(edge: Edge) -> tuple[bytes, bytes, bytes, float]:
        answers = await asyncio.gather(edge.ask(b"GET /x HTTP/1.1\r\nho"), edge.ask(b""), edge.ask(b"\r\n"))
        return *answers, edge.hits(Limit.HEADER_TIME)

    half, silent, blank, hits = run(loop, test, headers_s=0.2)
    assert half.startswith(b"HTTP/1.1 408 Request Timeout\r\n") and b'"error_type":"timeout"' in half
    assert (silent, blank, hits) == (b"", b"", 3)


@loops
def test_a_second_request_has_its_own_time(loop):
    async def test(edge: Edge) -> bytes:
        reader, writer = await edge.open()
        writer.write(GET)
        await reader.readuntil(b"ok")
        await asyncio.sleep(0.5)  # idle for more seconds than headers may take
        writer.write(GET)
        await reader.readuntil(b"ok")
        writer.write(b"G")
        return await reader.read()

    assert run(loop, test, headers_s=0.3).startswith(b"HTTP/1.1 408 ")


@loops
def test_empty_lines_do_not_keep_an_idle_connection(loop):
    async def test(edge: Edge) -> bytes:
        reader, writer = await edge.open()
        writer.write(GET)
        await reader.readuntil(b"ok")
        writer.write(b"\r\n")
        return await reader.read()

    assert run(loop, test, headers_s=0.2) == b""


@loops
@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["half", "whole"])
def test_large_headers_are_refused(loop, end):
    async def test(edge: Edge) -> tuple[bytes, int, float]:
        content = b"GET /x HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 600_000 + end
        return await edge.ask(content), edge.app.requests, edge.hits(Limit.HEADER_SIZE)

    answer, requests, hits = run(loop, test)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"connection: close" in answer
    assert b'"error_type":"headers_too_large"' in answer
    assert (requests, hits) == (0, 1)


@loops
def test_headers_below_the_limit_pass(loop):
    async def test(edge: Edge) -> bytes:
        return await edge.ask(b"GET /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: " + b"a" * 65_000 + b"\r\n\r\n")

    assert run(loop, test).endswith(b"ok")


@loops
def test_a_body_that_does_not_end_is_a_timeout(loop):
    async def test(edge: Edge) -> tuple[bytes, float]:
        answer = await edge.ask(post(b"x", b"content-length: 5") + b"abc")
        await edge.app.gone.wait()
        return answer, edge.hits(Limit.BODY_TIME)

    answer, hits = run(loop, test, body_s=0.2)
    assert answer.startswith(b"HTTP/1.1 408 ") and hits == 1


@loops
def test_the_rest_of_a_body_after_its_answer_does_not_end_the_connection(loop):
    async def test(edge: Edge) -> tuple[bytes, int]:
        reader, writer = await edge.open()
        writer.write(post(b"unread", b"content-length: 6") + b"abc")
        await reader.readuntil(b"ok")
        writer.write(b"def" + post(b"x", b"content-length: 1", b"connection: close") + b"z")
        return await reader.read(), edge.app.received

    answer, received = run(loop, test)
    assert answer.endswith(b"ok") and received == 1


@loops
def test_an_answered_request_is_not_read_for_ever(loop):
    async def test(edge: Edge) -> float:
        reader, writer = await edge.open()
        writer.write(post(b"unread", b"content-length: 50000000"))
        await reader.readuntil(b"ok")
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"x" * 50_000)
                await writer.drain()
                await asyncio.sleep(0)
        await until(lambda: edge.num_connections == 0)
        return edge.hits(Limit.BODY_SIZE)

    assert run(loop, test) == 1


@loops
@pytest.mark.parametrize("endless", [b"t: x\r\n" * 1000, b"t: " + b"x" * 6000], ids=["lines", "one line"])
def test_endless_trailers_after_a_body_are_neither_kept_nor_read(loop, endless):
    async def test(edge: Edge) -> tuple[float, int]:
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
        return edge.hits(Limit.HEADER_SIZE), sent

    hits, sent = run(loop, test)
    assert hits == 1 and sent < 50_000_000


CHUNKED = post(b"x", b"transfer-encoding: chunked", b"connection: close")
LAST_CHUNK = b"0\r\nt: x\r\n\r\n"


@loops
@pytest.mark.parametrize(
    "pieces", [b"1\r\na\r\n" * 512, (b"40\r\n" + b"a" * 64 + b"\r\n") * 1_000], ids=["few", "not tiny"]
)
def test_a_body_in_small_pieces_is_read(loop, pieces):
    async def test(edge: Edge) -> tuple[bytes, int]:
        answer = await edge.ask(CHUNKED + pieces + LAST_CHUNK)
        return answer, edge.app.received

    answer, received = run(loop, test)
    assert answer.endswith(b"ok") and received == pieces.count(b"a")


@loops
def test_a_body_in_very_many_tiny_pieces_is_refused_with_one_answer(loop):
    async def test(edge: Edge) -> tuple[list[bytes], float]:
        answers = [await edge.ask(CHUNKED + b"1\r\na\r\n" * count + LAST_CHUNK) for count in (600, 50_000)]
        return answers, edge.hits(Limit.CHUNKS)

    answers, hits = run(loop, test)
    assert hits == 2
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
        assert b"many chunks of less than 64 bytes" in answer


@loops
def test_connections_beyond_the_limit_are_refused_at_once(loop):
    async def test(edge: Edge) -> tuple[bytes, bytes, float]:
        writers = [(await edge.open())[1] for _ in range(2)]
        await until(lambda: edge.num_connections == 2)
        refused = await edge.ask(b"")
        writers[0].close()
        await until(lambda: edge.num_connections == 1)
        return refused, await edge.ask(GET.replace(b"host", b"connection: close\r\nhost")), edge.hits(Limit.CONNECTIONS)

    refused, served, hits = run(loop, test, max_connections=2)
    assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in refused
    assert served.endswith(b"ok") and hits == 1


@loops
def test_a_client_that_never_reads_loses_its_stream(loop):
    async def test(edge: Edge) -> float:
        with socket.create_connection(edge.address) as client:
            client.sendall(GET.replace(b"/x", b"/endless"))
            await edge.app.gone.wait()
            await until(lambda: edge.num_connections == 0)
        return edge.hits(Limit.WRITE_TIME)

    assert run(loop, test, write_s=0.3) == 1


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
    """Writing is paused from the first byte to nearly the last, for longer than the write deadline."""

    async def test(edge: Edge) -> tuple[bytes, float]:
        reader, writer = await edge.open()
        writer.write(GET.replace(b"/x", b"/large").replace(b"host", b"connection: close\r\nhost"))
        answer = b""
        while part := await reader.read(2**18):
            answer += part
            await asyncio.sleep(0.03)
        return answer, edge.hits(Limit.WRITE_TIME)

    answer, hits = run(loop, test, write_s=0.4)
    assert LARGE in answer and answer.endswith(b"0\r\n\r\n") and hits == 0


@loops
def test_an_answer_left_unread_does_not_keep_its_connection(loop):
    """The unread bytes exceed the kernel's buffers. Writing never pauses again, so only the write deadline ends the
    wait.
    """

    async def test(edge: Edge) -> float:
        with socket.create_connection(edge.address) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(GET.replace(b"/x", b"/endless"))
            await until(lambda: any(one.flow.write_paused for one in edge.server.server_state.connections))
            [connection] = edge.server.server_state.connections
            connection.transport.close()  # uvicorn's way to close, which waits for the buffer
            await until(lambda: edge.num_connections == 0)
        return edge.hits(Limit.WRITE_TIME)

    assert run(loop, test, write_s=0.3) == 1


@loops
def test_requests_sent_ahead_are_bounded(loop):
    async def test(edge: Edge) -> tuple[int, float]:
        _, writer = await edge.open()
        writer.write(GET.replace(b"/x", b"/endless") + GET * 1000)
        await edge.app.gone.wait()
        return edge.app.requests, edge.hits(Limit.PIPELINE)

    assert run(loop, test) == (1, 1)


@loops
def test_a_client_that_leaves_with_a_second_request_waiting_ends_the_first(loop):
    async def test(edge: Edge) -> None:
        reader, writer = await edge.open()
        writer.write(GET.replace(b"/x", b"/endless") + GET)
        await reader.read(10)
        writer.transport.abort()
        await edge.app.gone.wait()

    run(loop, test)


@loops
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
def test_bytes_that_are_not_http_are_400_and_do_not_reach_the_application(loop, content):
    async def test(edge: Edge) -> bytes:
        return await edge.ask(content)

    answer = run(loop, test)
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


@loops
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
def test_a_request_that_a_proxy_could_read_differently_is_refused(loop, content):
    async def test(edge: Edge) -> tuple[bytes, int]:
        return await edge.ask(content), edge.app.requests

    answer, requests = run(loop, test)
    assert is_invalid_request(answer), answer
    assert requests == 0


@loops
@pytest.mark.parametrize("content", [b"GET /x HTTP/1.0\r\n\r\n", b"GET /x HTTP/1.0\r\nhost: x\r\n\r\n"])
def test_an_old_client_need_not_name_the_host(loop, content):
    async def test(edge: Edge) -> bytes:
        return await edge.ask(content)

    assert run(loop, test).endswith(b"ok")


@loops
def test_bytes_that_are_not_http_put_no_error_into_a_streaming_answer(loop):
    async def test(edge: Edge) -> bytes:
        reader, writer = await edge.open()
        writer.write(GET.replace(b"/x", b"/endless"))
        await reader.read(10)
        writer.write(b"\x16\x03\x01")
        answer = b""
        with suppress(ConnectionResetError):
            while part := await reader.read(2**16):
                answer += part
        return answer

    assert b"400 Bad Request" not in run(loop, test)
