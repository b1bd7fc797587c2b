"""Sends the requests of both clients, blocking and asynchronous, and parses the answers and streams."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar

import pydantic

from text_generation.connection import Connection
from text_generation.errors import IncompleteGenerationError
from text_generation.parse import parse_answer, parse_event
from text_generation.requests import to_json
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

M = TypeVar("M", bound=pydantic.BaseModel)

_DONE = "[DONE]"


class Session:
    """Sends the requests of one client. `base_url` itself is the route of `generate`, as in TGI; the OpenAI routes lie
    below it.
    """

    def __init__(self, base_url: str, connection: Connection) -> None:
        self.base_url = base_url
        self._connection = connection
        root = base_url.rstrip("/")
        self._chat_url, self._completion_url = f"{root}/v1/chat/completions", f"{root}/v1/completions"

    async def aclose(self) -> None:
        await self._connection.aclose()

    async def generate(self, request: Request) -> Response:
        return await self._send(Response, self.base_url, request)

    def generate_stream(self, request: Request) -> AsyncIterator[StreamResponse]:
        return self._stream(StreamResponse, self.base_url, request, lambda event: event.generated_text is not None)

    async def chat(self, request: ChatRequest) -> ChatComplete:
        return await self._send(ChatComplete, self._chat_url, request)

    def chat_stream(self, request: ChatRequest) -> AsyncIterator[ChatCompletionChunk]:
        return self._stream(ChatCompletionChunk, self._chat_url, request)

    async def completion(self, request: CompletionRequest) -> Completion:
        return await self._send(Completion, self._completion_url, request)

    def completion_stream(self, request: CompletionRequest) -> AsyncIterator[Completion]:
        return self._stream(Completion, self._completion_url, request)

    async def _send(self, model: type[M], url: str, request: pydantic.BaseModel) -> M:
        return parse_answer(model, await self._connection.post(url, to_json(request)))

    async def _stream(
        self, model: type[M], url: str, request: pydantic.BaseModel, is_last: Callable[[M], bool] = lambda event: False
    ) -> AsyncIterator[M]:
        """Yields the parsed events of a stream. The stream ends normally after an event that `is_last`, or after
        `[DONE]`. Reads to the end of the body, so that the connection can be used again.
        """
        complete = False
        async with aclosing(self._connection.stream(url, to_json(request))) as events:
            async for data in events:
                if data == _DONE:
                    complete = True
                    continue
                event = parse_event(model, data)
                complete = complete or is_last(event)
                yield event
        if not complete:
            raise IncompleteGenerationError("the stream ended before its last token; try again")
