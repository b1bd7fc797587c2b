"""Bodies larger than the limit, sent to the real application over loopback."""

import asyncio
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from text_generation_router.http.closing import LINGER_BYTES
from text_generation_router.http.limits import ConnectionLimits
from text_generation_router.http.server import Server, uvicorn_config

LARGE = 50_000_000
HEAD = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
# Bytes that a client may have sent before the server reads them: buffers of both sockets and of the server.
BUFFERS = 16 * 2**20


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.sent = 0

    async def answer(self) -> bytes:
        answer = await self.reader.readuntil(b"\r\n\r\n")
        length = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return answer + await self.reader.readexactly(length)

    async def send_until_refused(self, piece: bytes) -> None:
        try:
            while self.sent < LARGE:
                self.writer.write(piece)
                self.sent += len(piece)
                await self.writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            pass


def run(server: Any, test: Callable[[Client], Awaitable[Any]]) -> Any:
    async def served() -> Any:
        limits = ConnectionLimits(10, server.config.requests.payload_limit, 30)
        http = Server(uvicorn_config(server.app, limits, server.limit_hits), server.gate, asyncio.Event().wait, 0)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        address = listener.getsockname()
        running = asyncio.create_task(http.serve(sockets=[listener]))
        while not http.started:
            await asyncio.sleep(0.01)
        client = Client(*await asyncio.open_connection(*address))
        try:
            async with asyncio.timeout(20):
                return await test(client)
        finally:
            client.writer.transport.abort()
            http.abort()
            await running

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(served())


def hits(server: Any) -> float:
    return server.metrics.registry.get_sample_value("tgi_router_limit_hits_total", {"limit": "body_size"})


def test_an_announced_length_is_refused_before_a_byte_of_the_body(server):
    async def test(client: Client) -> bytes:
        client.writer.write(HEAD + b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % LARGE)
        return await client.answer()

    answer = run(server, test)
    assert answer.startswith(b"HTTP/1.1 413 ") and b'"error_type":"payload_too_large"' in answer
    assert b"connection: close\r\n" in answer and hits(server) == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_the_rest_of_a_large_body_is_not_taken(server, chunked):
    """The answer arrives while the client is still sending; then the connection ends."""
    piece = b"10000\r\n" + b"x" * 2**16 + b"\r\n" if chunked else b"x" * 2**16
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % LARGE

    async def test(client: Client) -> tuple[bytes, int]:
        client.writer.write(HEAD + framing + b"\r\n\r\n")
        sending = asyncio.create_task(client.send_until_refused(piece))
        answer = await client.answer()
        await sending
        return answer, client.sent

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer, sent = run(server, test)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close\r\n" in answer
    assert sent < LINGER_BYTES + BUFFERS < LARGE
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * BUFFERS / 1024  # KiB
    assert hits(server) == 1


def test_a_large_body_without_a_key_is_not_taken_either(make_server):
    server = make_server(api_keys={b"x" * 32: ""})

    async def test(client: Client) -> tuple[bytes, int]:
        client.writer.write(HEAD + b"content-length: %d\r\n\r\n" % LARGE)
        sending = asyncio.create_task(client.send_until_refused(b"x" * 2**16))
        answer = await client.answer()
        await sending
        return answer, client.sent

    answer, sent = run(server, test)
    assert answer.startswith(b"HTTP/1.1 401 ") and sent < BUFFERS


@pytest.mark.parametrize("path", ["/nowhere", "/generate", "/info"])
def test_a_refusal_of_head_has_no_body(make_server, path):
    server = make_server(api_keys={b"x" * 32: ""} if path == "/info" else {}, closed_routes=path == "/info")

    async def test(client: Client) -> bytes:
        client.writer.write(b"HEAD %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path.encode())
        return await client.reader.read()

    head, _, body = run(server, test).partition(b"\r\n\r\n")
    assert head.split()[1] in (b"401", b"404", b"405") and body == b""
    assert b"content-type: application/json" in head
