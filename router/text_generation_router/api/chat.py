"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import Request, Response

from text_generation_router.api.answer import Answers
from text_generation_router.api.asking import CHAT
from text_generation_router.api.generation import Generation, Result
from text_generation_router.api.openai import (
    all_chat_logprobs,
    chat_logprobs,
    chunk_json,
    finish_reason,
    start_of_choices,
    until_done,
    usage_json,
)
from text_generation_router.api.schemas import ChatOptions, ChatRequest, RenderedChat
from text_generation_router.api.services import Services
from text_generation_router.errors import TemplateError, ValidationError
from text_generation_router.http.direct import DirectWriter
from text_generation_router.http.encoding import to_event, to_event_with
from text_generation_router.scheduling.share import Share
from text_generation_router.text.events import TokenEvent
from text_generation_router.text.validation import Prompt

KIND = "chat.completion"
# Requests counted for one chat, as in TGI: the chat and its generation.
REQUESTS = 2


class ChatRoutes:
    """The route of chats, which also provides the steps that differ between routes (see `AnswerDialect`)."""

    question = CHAT
    refused_requests = REQUESTS

    def __init__(self, services: Services) -> None:
        self._services = services
        self._answers = Answers(services)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation through the model's chat template, at once or as a stream."""
        return await self._answers.answer(request, self)

    def num_requests(self, _: ChatOptions) -> int:
        return REQUESTS

    async def prompts(self, asked: ChatOptions, share: Share) -> Sequence[Prompt]:
        max_tokens = requested_tokens(asked)
        text = asked.prompt if isinstance(asked, RenderedChat) else await self._render(asked, share)
        # Templates write special tokens themselves.
        return [Prompt(text, asked.sampling_parameters(max_tokens, asked.top_logprobs), add_special_tokens=False)]

    async def _render(self, asked: ChatOptions, share: Share) -> str:
        assert isinstance(asked, ChatRequest)
        if self._services.renderer is None:
            raise TemplateError("template not found")
        return await self._services.renderer.render(asked.conversation(), share)

    def events(
        self, asked: ChatOptions, generations: Sequence[Generation], writer: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        [generation] = generations
        return until_done(self._chunks(asked, generation, writer))

    async def answer(self, asked: ChatOptions, results: Sequence[Result]) -> dict[str, Any]:
        [result] = results
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": result.finish.generated_text},
            "logprobs": await all_chat_logprobs(result.rows) if asked.logprobs else None,
            "finish_reason": finish_reason(result.finish.reason),
        }
        return self._head(KIND, asked) | {"choices": [choice], "usage": usage_json([result.timing])}

    def _head(self, kind: str, asked: ChatOptions) -> dict[str, Any]:
        served = self._services.config.tokenizer_name
        model = served if asked.model in (None, "tgi") else asked.model
        return chunk_json(kind, model, self._services.system_fingerprint)

    async def _chunks(
        self, asked: ChatOptions, generation: Generation, writer: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        head = self._head(f"{KIND}.chunk", asked)
        start = start_of_choices(head)

        def encode(event: TokenEvent) -> bytes:
            return to_event_with(start, _chunk_choice(event, asked), b'],"usage":null}')

        generation.write_through(writer, encode)
        try:
            async for event in generation:
                yield encode(event)
            if asked.include_usage and generation.timing is not None:
                yield to_event(head | {"choices": [], "usage": usage_json([generation.timing])})
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
