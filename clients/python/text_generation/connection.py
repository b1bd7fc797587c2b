"""Sends bytes to one server and receives bytes, over pooled HTTP connections. Every wait is bounded. Asyncio only."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager

import httpx

from text_generation.errors import ServerConnectionError, TimeoutExceededError
from text_generation.parse import answer_error
from text_generation.sse import EventDecoder
from text_generation.timeouts import Stopwatch, Timeout

# Requests never wait for a connection. An idle connection is closed before uvicorn closes it, which happens after 5 s.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=4.0)


class Connection:
    """A pool of HTTP connections for each event loop. Several event loops may use it, also one after the other."""

    def __init__(
        self,
        headers: Mapping[str, str] | None,
        cookies: Mapping[str, str] | None,
        timeout: Timeout,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._cookies = dict(cookies or {})
        self._timeout = timeout
        self._transport = transport
        self._pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )
        self._closed = False

    async def post(self, url: str, body: bytes) -> bytes:
        """Sends a POST request. Returns the body of an answer with status 200, and raises the server's error for any
        other status.
        """
        with _transport_errors(url, self._timeout):
            response = await Stopwatch(self._timeout).answer(lambda: self._pool().post(url, content=body))
        if response.status_code != httpx.codes.OK:
            raise answer_error(response.status_code, response.content)
        return response.content

    async def stream(self, url: str, body: bytes) -> AsyncGenerator[str, None]:
        """Yields the data of each server-sent event. Closing the iterator early closes the connection."""
        watch = Stopwatch(self._timeout)
        with _transport_errors(url, self._timeout):
            request = self._pool().build_request("POST", url, content=body)
            response = await watch.first_token(lambda: self._pool().send(request, stream=True))
            try:
                if response.status_code != httpx.codes.OK:
                    raise answer_error(response.status_code, await watch.answer(response.aread))
                events = _Events(response)
                wait = watch.first_token
                while batch := await wait(events.next_batch):
                    for data in batch:
                        yield data
                    wait = watch.next_token
            finally:
                await response.aclose()

    async def aclose(self) -> None:
        self._closed = True
        if pool := self._pools.pop(asyncio.get_running_loop(), None):
            await pool.aclose()

    def _pool(self) -> httpx.AsyncClient:
        if self._closed:
            raise RuntimeError("this client is closed; make a new one")
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            self._pools[loop] = httpx.AsyncClient(
                headers=self._headers,
                cookies=self._cookies,
                timeout=httpx.Timeout(None, connect=self._timeout.connect),
                limits=_LIMITS,
                follow_redirects=True,
                transport=self._transport,
            )
        return self._pools[loop]


class _Events:
    def __init__(self, response: httpx.Response) -> None:
        self._pieces = response.aiter_bytes()
        self._decoder = EventDecoder()

    async def next_batch(self) -> list[str]:
        """The next events of the stream: at least one event, or an empty list at the end. Continues reading after
        comments and incomplete events.
        """
        async for piece in self._pieces:
            if events := self._decoder.feed(piece):
                return events
        return self._decoder.end()


@contextmanager
def _transport_errors(url: str, timeout: Timeout) -> Iterator[None]:
    """Turns errors of httpx into errors of this package. They name the URL without user, password and query."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        if timeout.connect is None:
            raise _connection_error(url, error) from error
        raise TimeoutExceededError("connect", timeout.connect) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _connection_error(url, error) from error


def _connection_error(url: str, error: Exception) -> ServerConnectionError:
    try:
        where = f"{httpx.URL(url).scheme}://{httpx.URL(url).netloc.decode('ascii')}"
    except httpx.InvalidURL:
        where = "the given URL"
    return ServerConnectionError(
        f"no answer from {where}: {str(error) or type(error).__name__}; check that the server runs there"
    )
