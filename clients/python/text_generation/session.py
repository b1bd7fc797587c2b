"""Sends the requests of a client, again if the server was busy, and parses the answers and streams."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

import pydantic

from text_generation.errors import IncompleteGenerationError, TextGenerationError
from text_generation.parse import parse_answer, parse_event
from text_generation.parts import ChatParts, CompletionParts, GeneratedParts
from text_generation.requests import to_json
from text_generation.retries import Call, Retries
from text_generation.streams import AsyncStream
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

if TYPE_CHECKING:
    from text_generation.connection import Connection

M = TypeVar("M", bound=pydantic.BaseModel)

_DONE = "[DONE]"


class Session:
    """Sends the requests of one client. `base_url` itself is the route of `generate`, as in TGI; the OpenAI routes lie
    below it.
    """

    def __init__(self, base_url: str, connection: "Connection", timeout: Timeout, retries: Retries) -> None:
        self.base_url = base_url
        self._connection = connection
        self._timeout = timeout
        self._retries = retries
        root = base_url.rstrip("/")
        self._chat_url, self._completion_url = f"{root}/v1/chat/completions", f"{root}/v1/completions"

    async def aclose(self) -> None:
        await self._connection.aclose()

    async def generate(self, request: Request) -> Response:
        return await self._send(Response, self.base_url, request)

    def generate_stream(self, request: Request) -> AsyncStream[StreamResponse, Response]:
        events = self._stream(StreamResponse, self.base_url, request, lambda event: event.generated_text is not None)
        return AsyncStream(events, GeneratedParts())

    async def chat(self, request: ChatRequest) -> ChatComplete:
        return await self._send(ChatComplete, self._chat_url, request)

    def chat_stream(self, request: ChatRequest) -> AsyncStream[ChatCompletionChunk, ChatComplete]:
        return AsyncStream(self._stream(ChatCompletionChunk, self._chat_url, request), ChatParts())

    async def completion(self, request: CompletionRequest) -> Completion:
        return await self._send(Completion, self._completion_url, request)

    def completion_stream(self, request: CompletionRequest) -> AsyncStream[Completion, Completion]:
        return AsyncStream(self._stream(Completion, self._completion_url, request), CompletionParts())

    async def _send(self, model: type[M], url: str, request: pydantic.BaseModel) -> M:
        body, call = to_json(request), Call(self._timeout, self._retries, streams=False)
        while True:
            try:
                return parse_answer(model, await self._connection.post(url, body, call))
            except TextGenerationError as error:
                await call.retry(error)

    async def _stream(
        self, model: type[M], url: str, request: pydantic.BaseModel, is_last: Callable[[M], bool] = lambda event: False
    ) -> AsyncGenerator[M, None]:
        """Yields the parsed events of a stream. A new attempt is made only before the first event."""
        body, call = to_json(request), Call(self._timeout, self._retries, streams=True)
        while True:
            try:
                async with aclosing(self._attempt(model, url, body, call, is_last)) as events:
                    async for event in events:
                        call.has_events = True
                        yield event
                return
            except TextGenerationError as error:
                await call.retry(error)

    async def _attempt(
        self, model: type[M], url: str, body: bytes, call: Call, is_last: Callable[[M], bool]
    ) -> AsyncGenerator[M, None]:
        """One attempt of a stream. The stream ends normally after an event that `is_last`, or after `[DONE]`. Reads to
        the end of the body, so that the connection can be used again.
        """
        complete = False
        async with aclosing(self._connection.stream(url, body, call)) as events:
            async for data in events:
                if data == _DONE:
                    complete = True
                    continue
                event = parse_event(model, data)
                complete = complete or is_last(event)
                yield event
        if not complete:
            raise IncompleteGenerationError("the stream ended before its last token; try again")
