"""The client for asyncio programs."""

from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, Self, TypeVar

import httpx

from text_generation.calls import Calls
from text_generation.connection import Connection
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
Answer = Coroutine[Any, Any, T]


class AsyncClient(
    Calls[
        Answer[Response],
        AsyncIterator[StreamResponse],
        Answer[ChatComplete],
        Answer[AsyncIterator[ChatCompletionChunk]],
        Answer[Completion],
        Answer[AsyncIterator[Completion]],
    ]
):
    """A client of one server, for asyncio programs. It keeps connections open: use it as a context manager, or call
    `aclose()` in the end. Calls are awaited, and `chat` and `completion` with `stream=True` are awaited before their
    chunks are iterated over.

    `timeout` is a `Timeout`, or a number of seconds for the whole of a call. `transport` is httpx's, for tests. Every
    method raises subclasses of `text_generation.errors.TextGenerationError`.
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

    @property
    def base_url(self) -> str:
        return self._session.base_url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._session.aclose()

    def _generate(self, request: Request) -> Answer[Response]:
        return self._session.generate(request)

    def _generate_stream(self, request: Request) -> AsyncIterator[StreamResponse]:
        return self._session.generate_stream(request)

    def _chat(self, request: ChatRequest) -> Answer[ChatComplete]:
        return self._session.chat(request)

    async def _chat_stream(self, request: ChatRequest) -> AsyncIterator[ChatCompletionChunk]:
        return self._session.chat_stream(request)

    def _completion(self, request: CompletionRequest) -> Answer[Completion]:
        return self._session.completion(request)

    async def _completion_stream(self, request: CompletionRequest) -> AsyncIterator[Completion]:
        return self._session.completion_stream(request)
