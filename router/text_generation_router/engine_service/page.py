"""A small HTTP server for an engine without an API: GET /metrics and /health, for scrapers and probes.

Plain HTTP without keys, so its answers have no texts and no names of callers: sums and states only.
"""

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

from text_generation_router.errors import StartError
from text_generation_router.metrics.page import CONTENT_TYPE

logger = logging.getLogger("text_generation_router")

# Seconds for a whole request and its answer; bytes of a request's head; connections at a time.
REQUEST_S, HEAD_BYTES, MAX_CONNECTIONS = 10.0, 8192, 64
TEXT = "text/plain; charset=utf-8"


class EnginePage:
    """Each connection carries one request. A client that is slow, or does not send HTTP, loses its connection."""

    def __init__(self, metrics: Callable[[], Awaitable[str]], is_healthy: Callable[[], Awaitable[bool]]) -> None:
        self._metrics = metrics
        self._is_healthy = is_healthy
        self._num_open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(REQUEST_S):
                    if self._num_open <= MAX_CONNECTIONS:
                        head = await reader.readuntil(b"\r\n\r\n")
                        writer.write(await self._answer(head))
                        await writer.drain()
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            status, kind, body = HTTPStatus.METHOD_NOT_ALLOWED, TEXT, ""
        elif path == b"/metrics":
            status, kind, body = HTTPStatus.OK, CONTENT_TYPE, await self._metrics()
        elif path == b"/health":
            status = HTTPStatus.OK if await self._is_healthy() else HTTPStatus.SERVICE_UNAVAILABLE
            kind, body = TEXT, ""
        else:
            status, kind, body = HTTPStatus.NOT_FOUND, TEXT, ""
        content = body.encode()
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"content-type: {kind}",
            f"content-length: {len(content)}",
            "connection: close",
        )
        start = "\r\n".join(lines).encode() + b"\r\n\r\n"
        return start if method == b"HEAD" else start + content


@asynccontextmanager
async def serving_page(page: EnginePage, host: str, ports: range) -> AsyncIterator[None]:
    """Inside this context the page is served on the first port of `ports` that is free; with an empty `ports` there is
    no page. StartError if no port can be opened."""
    if not ports:
        yield
        return
    server, port = await _listening(page, host, ports)
    logger.info("Metrics of the engine at http://%s:%d/metrics", host, port)
    try:
        yield
    finally:
        server.close()


async def _listening(page: EnginePage, host: str, ports: range) -> tuple[asyncio.Server, int]:
    """The first port of `ports` that could be opened, and its server. To listen is the only test whether a port is
    free, so two engines that start at once never get the same port."""
    for port in ports:
        try:
            return await asyncio.start_server(page.serve, host, port, limit=HEAD_BYTES), port
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port != ports[-1]:
                continue
            tried = f"{host}:{port}" if port == ports[0] else f"{host}, any port from {ports[0]} to {port}"
            raise StartError(
                f"cannot listen on {tried}: {error.strerror}; choose another --engine-metrics-port"
            ) from error
    raise AssertionError("`ports` is empty")
