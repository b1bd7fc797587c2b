"""The client for ordinary, synchronous programs: the asynchronous one, driven from a thread."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from typing import Self, TypeVar

import httpx

from text_generation.calls import Calls
from text_generation.connection import Connection
from text_generation.loop_thread import LoopThread
from text_generation.session import Session
from text_generation.timeouts import Timeout
from text_generation.types import (
    ChatComplete,
    ChatCompletionChunk,
    ChatRequest,
    Completion,
    CompletionRequest,
    Request,
    Response,
    StreamResponse,
)

T = TypeVar("T")


class Client(
    Calls[
        Response,
        Iterator[StreamResponse],
        ChatComplete,
        Iterator[ChatCompletionChunk],
        Completion,
        Iterator[Completion],
    ]
):
    """A client of one server, for synchronous code; threads may share it. Use it as a context manager, or call
    `close()` in the end.

    Calls run `AsyncClient` in an event loop, because only there can a limit on the next *token* be kept: a socket's own
    timeout starts again with every keep-alive comment of the server.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
        timeout: float | Timeout = Timeout(),  # noqa: B008  frozen, so calls may share it
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._session = Session(base_url, Connection(headers, cookies, Timeout.of(timeout), transport))
        self._loop = LoopThread(self, self._session.aclose)

    @property
    def base_url(self) -> str:
        return self._session.base_url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._loop.close()

    def _generate(self, request: Request) -> Response:
        return self._loop.run(self._session.generate(request))

    def _generate_stream(self, request: Request) -> Iterator[StreamResponse]:
        return self._iterate(self._session.generate_stream(request))

    def _chat(self, request: ChatRequest) -> ChatComplete:
        return self._loop.run(self._session.chat(request))

    def _chat_stream(self, request: ChatRequest) -> Iterator[ChatCompletionChunk]:
        return self._iterate(self._session.chat_stream(request))

    def _completion(self, request: CompletionRequest) -> Completion:
        return self._loop.run(self._session.completion(request))

    def _completion_stream(self, request: CompletionRequest) -> Iterator[Completion]:
        return self._iterate(self._session.completion_stream(request))

    def _iterate(self, events: AsyncIterator[T]) -> Iterator[T]:
        try:
            while (event := self._loop.run(_next(events))) is not None:
                yield event
        finally:
            self._loop.post(_close(events))


async def _next(events: AsyncIterator[T]) -> T | None:
    return await anext(events, None)


async def _close(events: AsyncIterator[object]) -> None:
    # The stream still runs if the wait for its next event was interrupted; then the cancelled wait closes the stream.
    with suppress(RuntimeError):
        await events.aclose()  # type: ignore[attr-defined]
