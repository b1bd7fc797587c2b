"""The small HTTP server of an engine without an API."""

import asyncio
import logging
import socket
from contextlib import AsyncExitStack

import pytest
import uvloop

from text_generation_router.engine_service import page as engine_page
from text_generation_router.engine_service.page import HEAD_BYTES, EnginePage, serving_page
from text_generation_router.errors import StartError


def answers(*requests: bytes, is_healthy: bool = True) -> list[bytes]:
    """What a client gets for each request, on a connection of its own."""

    async def metrics() -> str:
        return "tgi_request_count 7\n"

    async def health() -> bool:
        return is_healthy

    async def ask(port: int, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def run() -> list[bytes]:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        async with serving_page(EnginePage(metrics, health), "127.0.0.1", range(port, port + 1)):
            return [await asyncio.wait_for(ask(port, request), 30) for request in requests]

    return asyncio.run(run())


def statuses(*requests: bytes, is_healthy: bool = True) -> list[int]:
    return [int(answer.split(b" ")[1]) for answer in answers(*requests, is_healthy=is_healthy)]


def test_metrics_and_health_are_told_and_nothing_else():
    (page,) = answers(b"GET /metrics?a=b HTTP/1.1\r\nhost: x\r\n\r\n")
    head, _, body = page.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK") and b"content-length: 20" in head
    assert body == b"tgi_request_count 7\n"
    assert answers(b"HEAD /metrics HTTP/1.1\r\n\r\n") == [head + b"\r\n\r\n"]
    others = (b"GET / HTTP/1.1\r\n\r\n", b"POST /metrics HTTP/1.1\r\n\r\n", b"nonsense\r\n\r\n")
    assert statuses(b"GET /health HTTP/1.1\r\n\r\n", *others) == [200, 404, 405, 405]
    assert statuses(b"GET /health HTTP/1.1\r\n\r\n", is_healthy=False) == [503]


def test_a_client_that_is_slow_or_sends_too_much_loses_its_connection_only(monkeypatch):
    monkeypatch.setattr(engine_page, "REQUEST_S", 0.05)
    slow, large = b"GET /metrics", b"GET /metrics HTTP/1.1\r\nx: " + bytes(4 * HEAD_BYTES)
    assert answers(slow, large) == [b"", b""]
    monkeypatch.setattr(engine_page, "MAX_CONNECTIONS", 0)
    assert answers(b"GET /metrics HTTP/1.1\r\n\r\n") == [b""]


async def test_a_port_in_use_is_refused_by_the_flag_s_name():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        page = EnginePage(lambda: None, lambda: None)
        with pytest.raises(StartError, match="--engine-metrics-port"):
            port = other.getsockname()[1]
            async with serving_page(page, "127.0.0.1", range(port, port + 1)):
                pass


def test_engines_that_start_at_once_share_out_the_ports_and_one_too_many_is_refused(caplog):
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as found:
        first = found.getsockname()[1]
        # Another program may have ports of the range as well; the range ends with the second free one.
        free = [port for port in range(first + 1, first + 100) if is_free(port)][:2]
    ports = range(first, free[1] + 1)
    pages = [serving_page(EnginePage(lambda: None, lambda: None), "127.0.0.1", ports) for _ in range(3)]

    async def run() -> None:
        with socket.create_server(("127.0.0.1", first)):
            async with AsyncExitStack() as stack:
                await asyncio.gather(*(stack.enter_async_context(page) for page in pages[:2]))
                told = sorted(record.args[1] for record in caplog.records if "Metrics of the engine" in record.msg)
                assert told == free
                with pytest.raises(StartError, match=f"any port from {first} to {free[1]}"):
                    await stack.enter_async_context(pages[2])

    uvloop.run(run())


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
