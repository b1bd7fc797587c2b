"""The client for asyncio programs."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal, Self, Unpack, overload

import httpx

from text_generation.connection import Connection
from text_generation.requests import (
    ChatOptions,
    CompletionOptions,
    Messages,
    chat_request,
    completion_request,
    generate_request,
    shows,
    stream_request,
    takes,
)
from text_generation.session import Session
from text_generation.timeouts import Timeout
from text_generation.types import (
    ChatComplete,
    ChatCompletionChunk,
    Completion,
    Request,
    Response,
    StreamResponse,
)


class AsyncClient:
    """Talks to one server. Connections are kept: use it as a context manager, or call `aclose()` in the end.

    `timeout` is a `Timeout`, or a number of seconds for the whole of a call. `transport` is httpx's, for tests.
    Every method raises subclasses of `text_generation.errors.TextGenerationError`.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
        timeout: float | Timeout = Timeout(),  # noqa: B008  frozen, so one for all is safe
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

    @takes(generate_request)
    async def generate(self, request: Request) -> Response:
        """The whole answer to a prompt, with details."""
        return await self._session.generate(request)

    @takes(stream_request)
    def generate_stream(self, request: Request) -> AsyncIterator[StreamResponse]:
        """The answer token by token; the last one carries the whole text and the details."""
        return self._session.generate_stream(request)

    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> ChatComplete: ...
    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> AsyncIterator[ChatCompletionChunk]: ...
    @shows(chat_request)
    async def chat(self, *args: Any, **options: Any) -> ChatComplete | AsyncIterator[ChatCompletionChunk]:
        """The answer to a conversation; with `stream=True` await first, then iterate over its chunks."""
        return await self._session.chat(chat_request(*args, **options))

    @overload
    async def completion(
        self, prompt: str, *, stream: Literal[False] = False, **options: Unpack[CompletionOptions]
    ) -> Completion: ...
    @overload
    async def completion(
        self, prompt: str, *, stream: Literal[True], **options: Unpack[CompletionOptions]
    ) -> AsyncIterator[Completion]: ...
    @shows(completion_request)
    async def completion(self, *args: Any, **options: Any) -> Completion | AsyncIterator[Completion]:
        """The continuation of a prompt by the OpenAI route; with `stream=True` await first, then iterate."""
        return await self._session.completion(completion_request(*args, **options))
