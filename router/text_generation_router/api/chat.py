"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import Request, Response

from text_generation_router.api.asking import CHAT
from text_generation_router.api.generation import Generation, close_all
from text_generation_router.api.headers import stream_headers, timing_headers
from text_generation_router.api.openai import (
    all_chat_logprobs,
    chat_logprobs,
    chunk_json,
    finish_reason,
    guarded,
    usage_json,
)
from text_generation_router.api.schemas import ChatOptions, ChatRequest, RenderedChat
from text_generation_router.api.services import Services
from text_generation_router.errors import TemplateError, ValidationError
from text_generation_router.http.disconnect import unless_disconnected
from text_generation_router.http.encoding import json_response
from text_generation_router.http.sse import EventStream
from text_generation_router.scheduling.request import TokenEvent
from text_generation_router.scheduling.share import Share
from text_generation_router.text.chat_template import Message
from text_generation_router.text.validation import Prompt

KIND = "chat.completion"
# Requests counted for one chat, as in TGI: the chat and its generation.
REQUESTS = 2


class ChatRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._inference = services.inference

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation through the model's chat template, at once or as a stream."""
        started = time.perf_counter()
        with self._inference.counted_refusals(REQUESTS):
            asked = await self._services.bodies.read(request, CHAT)
        self._services.metrics.request_count.inc(REQUESTS)
        with self._inference.counted_failures():
            caller = self._services.callers.caller_of(request)
            max_tokens = requested_tokens(asked)
            # If the client disconnects, its chat leaves the queue of chats to be rendered.
            prompt = await unless_disconnected(request.receive, self._prompt(asked, max_tokens, caller.share))
        if asked.stream:
            starting = self._inference.start([prompt], caller, started)
            generations = await unless_disconnected(request.receive, starting)
            headers = stream_headers(self._services.config.compute_type, len(prompt.inputs))
            events = guarded(self._chunks(asked, generations[0]))
            return EventStream(events, headers, close=partial(close_all, generations))
        [result] = await unless_disconnected(request.receive, self._inference.results([prompt], caller, started))
        rows = tuple(zip(result.tokens, result.top_tokens, strict=True))
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": result.finish.generated_text},
            "logprobs": await all_chat_logprobs(rows) if asked.logprobs else None,
            "finish_reason": finish_reason(result.finish.reason),
        }
        answer = self._head(KIND, asked) | {"choices": [choice], "usage": usage_json([result.timing])}
        return json_response(answer, timing_headers(self._services.config.compute_type, [result.timing]))

    async def _prompt(self, asked: ChatOptions, max_tokens: int | None, share: Share) -> Prompt:
        text = asked.prompt if isinstance(asked, RenderedChat) else await self._render(asked, share)
        # Templates write special tokens themselves.
        return Prompt(text, asked.sampling_parameters(max_tokens, asked.top_logprobs), add_special_tokens=False)

    async def _render(self, asked: ChatOptions, share: Share) -> str:
        assert isinstance(asked, ChatRequest)
        if self._services.renderer is None:
            raise TemplateError("template not found")
        messages = tuple(Message(message.role, message.content) for message in asked.messages)
        return await self._services.renderer.render(messages, share)

    def _head(self, kind: str, asked: ChatOptions) -> dict[str, Any]:
        served = self._services.config.tokenizer_name
        model = served if asked.model in (None, "tgi") else asked.model
        return chunk_json(kind, model, self._services.system_fingerprint)

    async def _chunks(self, asked: ChatOptions, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        head = self._head(f"{KIND}.chunk", asked)
        try:
            async for event in generation:
                yield head | {"choices": [_chunk_choice(event, asked)], "usage": None}
            if asked.include_usage and generation.timing is not None:
                yield head | {"choices": [], "usage": usage_json([generation.timing])}
        finally:
            generation.close()


def _chunk_choice(event: TokenEvent, asked: ChatOptions) -> dict[str, Any]:
    token = event.token
    return {
        "index": 0,
        "delta": {"role": "assistant", "content": event.text},
        "logprobs": chat_logprobs((token, event.top_tokens)) if asked.logprobs and token is not None else None,
        "finish_reason": None if event.finish is None else finish_reason(event.finish.reason),
    }


def requested_tokens(asked: ChatOptions) -> int | None:
    if asked.max_tokens is not None and asked.max_completion_tokens is not None:
        raise ValidationError("`max_tokens` and `max_completion_tokens` mean the same, send one of them")
    return asked.max_tokens if asked.max_tokens is not None else asked.max_completion_tokens
