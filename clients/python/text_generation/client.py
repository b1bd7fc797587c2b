"""The client for ordinary, synchronous programs: the asynchronous one, driven from a thread."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import httpx

from text_generation.connection import Connection
from text_generation.loop_thread import LoopThread
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

T = TypeVar("T")


class Client:
    """`AsyncClient` for synchronous code; may be shared between threads. Use it as a context manager, or `close()` it.

    It waits in an event loop because only there can a limit on the next *token* be kept: a socket's own timeout starts
    again with every keep-alive comment of the server.
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

    @takes(generate_request)
    def generate(self, request: Request) -> Response:
        """The whole answer to a prompt, with details."""
        return self._loop.run(self._session.generate(request))

    @takes(stream_request)
    def generate_stream(self, request: Request) -> Iterator[StreamResponse]:
        """The answer token by token; the last one carries the whole text and the details."""
        return self._iterate(self._session.generate_stream(request))

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> ChatComplete: ...
    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> Iterator[ChatCompletionChunk]: ...
    @shows(chat_request)
    def chat(self, *args: Any, **options: Any) -> ChatComplete | Iterator[ChatCompletionChunk]:
        """The answer to a conversation, or with `stream=True` an iterator over its chunks."""
        answer = self._loop.run(self._session.chat(chat_request(*args, **options)))
        return answer if isinstance(answer, ChatComplete) else self._iterate(answer)

    @overload
    def completion(
        self, prompt: str, *, stream: Literal[False] = False, **options: Unpack[CompletionOptions]
    ) -> Completion: ...
    @overload
    def completion(
        self, prompt: str, *, stream: Literal[True], **options: Unpack[CompletionOptions]
    ) -> Iterator[Completion]: ...
    @shows(completion_request)
    def completion(self, *args: Any, **options: Any) -> Completion | Iterator[Completion]:
        """The continuation of a prompt by the OpenAI route, or with `stream=True` an iterator over its chunks."""
        answer = self._loop.run(self._session.completion(completion_request(*args, **options)))
        return answer if isinstance(answer, Completion) else self._iterate(answer)

    def _iterate(self, events: AsyncIterator[T]) -> Iterator[T]:
        try:
            while (event := self._loop.run(_next(events))) is not None:
                yield event
        finally:
            self._loop.post(_close(events))


async def _next(events: AsyncIterator[T]) -> T | None:
    return await anext(events, None)


async def _close(events: AsyncIterator[object]) -> None:
    # It is running still if the wait for its next event was interrupted; then the cancelled wait closes it.
    with suppress(RuntimeError):
        await events.aclose()  # type: ignore[attr-defined]
