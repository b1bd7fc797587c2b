"""POST /v1/messages and POST /v1/messages/count_tokens, as Anthropic has them."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from text_generation_common.logs import request_id
from text_generation_router.api.anthropic.chat import NAMES, chat_of, counted_chat_of
from text_generation_router.api.anthropic.fields import COUNT_TOKENS_BODY, MESSAGES_BODY
from text_generation_router.api.anthropic.schemas import MessagesOptions
from text_generation_router.api.anthropic.writer import (
    PING,
    MessageEnd,
    MessageStream,
    content_of,
    message_json,
    usage_json,
)
from text_generation_router.api.common.generation import Generation
from text_generation_router.api.common.services import Services
from text_generation_router.api.openai.chat_prompt import chat_prompt, rendered
from text_generation_router.errors import InferenceError
from text_generation_router.http.caller import Caller
from text_generation_router.http.dialects import ANTHROPIC
from text_generation_router.http.disconnect import unless_disconnected
from text_generation_router.http.encoding import json_response
from text_generation_router.http.sse import DirectWriter
from text_generation_router.text.tokens.events import Finish, FinishReason, TokenEvent
from text_generation_router.text.tokens.pieces import NewestCall
from text_generation_router.text.validation import Prompt, renaming


class MessagesRoutes:
    """The routes of messages; for /v1/messages also the steps that differ between routes (see `AnswerDialect`)."""

    body_kind = MESSAGES_BODY
    refused_requests = 1

    def __init__(self, services: Services) -> None:
        self._services = services = services.without_tgi_dialect()

    async def count_tokens(self, request: Request) -> Response:
        """The number of tokens of the prompt that the chat template makes of a conversation."""
        services = self._services
        with services.inference.counted_refusals(1):
            asked = await services.bodies.read(request, COUNT_TOKENS_BODY)
            services.ignored.note_model(request, asked.model, (services.served_name, services.config.tokenizer_name))
        services.metrics.count_requests()
        with services.inference.counted_failures():
            share = services.callers.caller_of(request).share
            with renaming(NAMES):
                text = await unless_disconnected(request.receive, rendered(services, counted_chat_of(asked), share))
            with services.inference.permit(share):
                ids = await unless_disconnected(request.receive, services.tokenizer.encode(text, False, share))
        return json_response({"input_tokens": ids.count})

    def num_requests(self, asked: MessagesOptions) -> int:
        return 1

    async def prompts(self, asked: MessagesOptions, caller: Caller) -> Sequence[Prompt]:
        with renaming(NAMES):
            chat = chat_of(asked)
            if self._services.chat_formats.reading.reasoning is None:  # without reasoning, no budget is exceeded
                chat = chat.model_copy(update={"max_thinking_tokens": None})
            return [await chat_prompt(self._services, chat, caller, NAMES)]

    async def answer(self, asked: MessagesOptions, results: Sequence[Generation]) -> dict[str, Any]:
        [result] = results
        pieces, finish = result.pieces_of_text, result.finish
        return message_json(
            f"msg_{request_id.get()}",
            self._services.served_name,
            content_of(pieces),
            end_of(finish, asked, NewestCall(pieces)),
            usage_json(result.prompt_tokens, finish.cached_tokens, finish.generated_tokens, result.reasoning_tokens),
        )

    async def events(
        self, asked: MessagesOptions, generations: Sequence[Generation], writer: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        [generation] = generations
        stream = MessageStream(f"msg_{request_id.get()}", self._services.served_name)
        encode = MessageEncoder(asked, generation, stream)
        generation.write_through(writer, encode)
        writer.keep_alive = PING  # sent also before the first event, while the prompt is computed
        try:
            async for event in generation:
                if events := encode(event):
                    yield events
        except InferenceError as error:
            yield ANTHROPIC.event(error)
        finally:
            generation.close()


class MessageEncoder:
    """Encodes the tokens of a stream as events. The first event waits for the first token, because it contains the
    number of cached tokens."""

    def __init__(self, asked: MessagesOptions, generation: Generation, stream: MessageStream) -> None:
        self._asked = asked
        self._generation = generation
        self._stream = stream
        self._has_begun = False

    def __call__(self, event: TokenEvent) -> bytes:
        stream, generation, finish = self._stream, self._generation, event.finish
        start = b""
        if not self._has_begun:
            self._has_begun = True
            start = stream.start(usage_json(generation.prompt_tokens, generation.cached_tokens, 0))
        body = stream.add(generation.pieces_of(event))
        if finish is None:
            return start + body
        counts = finish.cached_tokens, finish.generated_tokens, generation.reasoning_tokens
        usage = usage_json(generation.prompt_tokens, *counts)
        return start + body + stream.end(end_of(finish, self._asked, stream.call), usage)


def end_of(finish: Finish, asked: MessagesOptions, call: NewestCall) -> MessageEnd:
    if finish.stop is not None:
        return MessageEnd("stop_sequence", finish.stop)
    if finish.reason is FinishReason.DEADLINE:
        return MessageEnd("max_tokens")  # the API has no reason for a deadline; the text could go on, too
    if finish.reason is FinishReason.LENGTH:
        is_wanted = finish.generated_tokens >= asked.max_tokens
        return MessageEnd("max_tokens" if is_wanted else "model_context_window_exceeded")
    return MessageEnd("tool_use" if call.is_whole else "end_turn")
