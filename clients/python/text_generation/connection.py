"""Sends bytes to one server and receives bytes, over pooled HTTP connections. Every wait is bounded. Asyncio only."""

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager

import httpx

from text_generation.address import shown_host
from text_generation.errors import ServerConnectionError, TextGenerationError, TimeoutExceededError
from text_generation.parse import answer_error
from text_generation.retries import Call, retry_after_s
from text_generation.sse import EventDecoder
from text_generation.timeouts import Timeout

_log = logging.getLogger("text_generation")

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
        self._ignored = {"", "model"}
        self._closed = False

    async def post(self, url: str, body: bytes, call: Call) -> bytes:
        """Sends a POST request. Returns the body of an answer with status 200, and raises the server's error for any
        other status.
        """
        call.request_id = None
        with _transport_errors(url, self._timeout):
            response = await call.watch.answer(lambda: self._pool().post(url, content=body))
        self._note(call, response)
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        return response.content

    async def stream(self, url: str, body: bytes, call: Call) -> AsyncGenerator[str, None]:
        """Yields the data of each server-sent event. Closing the iterator early closes the connection."""
        call.request_id = None
        with _transport_errors(url, self._timeout):
            request = self._pool().build_request("POST", url, content=body)
            response = await call.watch.first_token(lambda: self._pool().send(request, stream=True))
            try:
                self._note(call, response)
                if response.status_code != httpx.codes.OK:
                    await call.watch.answer(response.aread)
                    raise _refusal(response)
                events = _Events(response)
                wait = call.watch.first_token
                while batch := await wait(events.next_batch):
                    for data in batch:
                        yield data
                    wait = call.watch.next_token
            finally:
                await response.aclose()

    async def aclose(self) -> None:
        self._closed = True
        if pool := self._pools.pop(asyncio.get_running_loop(), None):
            await pool.aclose()

    def _note(self, call: Call, response: httpx.Response) -> None:
        """Notes the id of the request, and warns once of each field that the server ignores. The field `model` is not
        reported: a server of one model may ignore it, and the client sends it always.
        """
        call.request_id = response.headers.get("x-request-id")
        names = {name.strip() for name in response.headers.get("x-ignored-parameters", "").split(",")}
        for name in sorted(names - self._ignored):
            _log.warning("the server does not know `%s`, and ignores it", name)
        self._ignored |= names

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


def _refusal(response: httpx.Response) -> TextGenerationError:
    error = answer_error(response.status_code, response.content)
    error.retry_after_s = retry_after_s(response.headers.get("retry-after"))
    return error


@contextmanager
def _transport_errors(url: str, timeout: Timeout) -> Iterator[None]:
    """Turns errors of httpx into errors of this package."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        if timeout.connect is None:
            raise _connection_error(url, error) from None
        raise TimeoutExceededError("connect", timeout.connect) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _connection_error(url, error) from None


def _connection_error(url: str, error: Exception) -> ServerConnectionError:
    reason = str(error) or type(error).__name__
    broken = ServerConnectionError(f"no answer from {shown_host(url)}: {reason}; check that the server runs there")
    broken.connected = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    return broken
