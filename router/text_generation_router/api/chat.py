"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from fastapi import Request, Response

from text_generation_router.api.answer import Answers
from text_generation_router.api.asking import CHAT
from text_generation_router.api.generation import Generation, Result, close_all
from text_generation_router.api.openai import (
    ChatLogprobs,
    ChunkWriter,
    Made,
    chunk_json,
    merged,
    row_of,
    rows_of,
    until_done,
    usage_json,
)
from text_generation_router.api.prompt_answers import prompt_logprobs_json
from text_generation_router.api.services import Services
from text_generation_router.api.v1_request import check_request, parameters_of
from text_generation_router.api.v1_schemas import ChatOptions, ChatRequest, RenderedChat
from text_generation_router.errors import TemplateError, ValidationError
from text_generation_router.http.direct import DirectWriter
from text_generation_router.scheduling.share import Share
from text_generation_router.text.events import TokenEvent
from text_generation_router.text.validation import Prompt

KIND = "chat.completion"
# What the route calls the fields that the checks of requests call by TGI's names.
NAMES = {
    "inputs": "messages",
    "max_new_tokens": "max_tokens",
    "top_n_tokens": "top_logprobs",
    "truncate": "truncate_prompt_tokens",
    "min_new_tokens": "min_tokens",
}


class ChatRoutes:
    """The route of chats, which also provides the steps that differ between routes (see `AnswerDialect`)."""

    question = CHAT
    refused_requests = 2  # requests to count for a refused body: the same number as for one text

    def __init__(self, services: Services) -> None:
        self._services = services
        self._style = services.style
        self._logprobs = ChatLogprobs(services.inference.vocabulary, has_bytes=not services.style.is_tgis)
        self._answers = Answers(services)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation through the model's chat template, at once or as a stream."""
        return await self._answers.answer(request, self)

    def num_requests(self, asked: ChatOptions) -> int:
        return 1 + asked.choices

    async def prompts(self, asked: ChatOptions, share: Share) -> Sequence[Prompt]:
        names = NAMES if asked.max_completion_tokens is None else NAMES | {"max_new_tokens": "max_completion_tokens"}
        return [await chat_prompt(self._services, asked, share, names)]

    def events(
        self, asked: ChatOptions, generations: Sequence[Generation], writer: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        dialect = self._services.dialects.of("/v1/chat/completions")
        return until_done(self._chunks(asked, generations, writer), dialect)

    async def answer(self, asked: ChatOptions, results: Sequence[Result]) -> dict[str, Any]:
        answer = self._head(KIND, asked) | {
            "choices": [await self._choice(index, result, asked) for index, result in enumerate(results)],
            "usage": usage_json([result.timing for result in results], asked.choices),
        }
        if asked.prompt_logprobs is not None:
            answer["prompt_logprobs"] = await prompt_logprobs_json(results[0], asked.prompt_logprobs)
        if asked.return_token_ids:
            answer["prompt_token_ids"] = results[0].input_ids
        return answer

    def _head(self, kind: str, asked: ChatOptions) -> dict[str, Any]:
        model = self._services.served_name
        if self._style.is_tgis and asked.model not in (None, "tgi"):
            model = asked.model  # TGI repeats the name of an adapter
        return chunk_json(kind, self._style.identity("chatcmpl"), model, self._services.system_fingerprint)

    async def _choice(self, index: int, result: Result, asked: ChatOptions) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": result.finish.generated_text},
            "logprobs": await self._logprobs.of_text(rows_of(result, asked.top_logprobs, self._style))
            if asked.logprobs
            else None,
            "finish_reason": self._style.reasons[result.finish.reason],
        }
        return choice | {"token_ids": [token.id for token in result.tokens]} if asked.return_token_ids else choice

    async def _chunks(
        self, asked: ChatOptions, generations: Sequence[Generation], writer: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        head = self._head(f"{KIND}.chunk", asked)
        write = ChunkWriter(head, asked, self._style, extra=b',"usage":null' if self._style.is_tgis else b"")
        encoders = [
            ChatEncoder(index, generation, asked, write, self._logprobs) for index, generation in enumerate(generations)
        ]
        if len(generations) == 1:  # the events of several texts are put in order by `merged`
            generations[0].write_through(writer, encoders[0])
        try:
            if asked.return_token_ids:
                yield write.prompt_ids(generations[0].input_ids)
            async for index, event in merged(generations):
                yield encoders[index](event)
            if asked.include_usage:
                yield write.usage([generation.timing for generation in generations])
        finally:
            close_all(generations)


class ChatEncoder:
    """Encodes the events of one text of a stream. In OpenAI's style the first chunk has the role and the last one the
    finish reason, each without text; in TGI's every chunk has the role, and the last text's chunk the finish reason."""

    def __init__(
        self, index: int, generation: Generation, asked: ChatOptions, write: ChunkWriter, logprobs: ChatLogprobs
    ) -> None:
        self._index = index
        self._asked = asked
        self._write = write
        self._logprobs = logprobs
        self._made = Made(generation)

    def __call__(self, event: TokenEvent) -> bytes:
        reason = None if event.finish is None else self._write.style.reasons[event.finish.reason]
        if self._write.style.is_tgis:
            return self._text(event, {"role": "assistant", "content": event.text}, reason)
        first = b"" if self._made.tokens else self._chunk({"role": "assistant", "content": ""}, None, None)
        text = self._text(event, {"content": event.text}, None)
        return first + text if reason is None else first + text + self._chunk({}, None, reason)

    def _text(self, event: TokenEvent, delta: dict[str, Any], reason: str | None) -> bytes:
        token = event.token
        self._made.add(event)
        row = None
        if self._asked.logprobs and token is not None:
            row = row_of(token, event.top_tokens, self._asked.top_logprobs, self._write.style)
        logprobs = self._logprobs.of_token(row) if row is not None else None
        ids = [token.id] if self._asked.return_token_ids and token is not None else None
        return self._chunk(delta, logprobs, reason, ids)

    def _chunk(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None, ids: list[int] | None = None
    ) -> bytes:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._write.chunk(choice if ids is None else choice | {"token_ids": ids}, self._made)


async def chat_prompt(services: Services, asked: ChatOptions, share: Share, names: Mapping[str, str]) -> Prompt:
    """What to generate from. `names`: see `Prompt`. Raises InferenceError."""
    check_request(asked, services)
    if asked.top_logprobs and not asked.logprobs and not services.style.is_tgis:
        raise ValidationError("`top_logprobs` is allowed only if `logprobs` is true")
    parameters = parameters_of(asked, services, requested_tokens(asked), asked.top_logprobs)
    text = await rendered(services, asked, share)
    # Templates write special tokens themselves.
    return Prompt(text, parameters, bool(asked.add_special_tokens), copies=asked.choices, names=names)


async def rendered(services: Services, asked: ChatOptions, share: Share) -> str:
    """The prompt that the chat template makes. Raises TemplateError or OverloadedError."""
    if isinstance(asked, RenderedChat):
        return asked.prompt
    assert isinstance(asked, ChatRequest)
    if services.renderer is None:
        raise TemplateError("template not found")
    return await services.renderer.render(asked.conversation(), share)


def requested_tokens(asked: ChatOptions) -> int | None:
    if asked.max_tokens is not None and asked.max_completion_tokens not in (None, asked.max_tokens):
        raise ValidationError("`max_tokens` and `max_completion_tokens` mean the same, send one of them")
    return asked.max_tokens if asked.max_tokens is not None else asked.max_completion_tokens
