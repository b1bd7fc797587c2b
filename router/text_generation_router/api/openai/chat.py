"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from text_generation_router.api.common.generation import Generation, close_all
from text_generation_router.api.common.services import Services
from text_generation_router.api.openai import request as v1_request
from text_generation_router.api.openai import tgi_calls
from text_generation_router.api.openai.answers import (
    ChatLogprobs,
    ChunkWriter,
    Made,
    chunk_json,
    merged,
    prompt_logprobs_json,
    row_of,
    rows_of,
    until_done,
    usage_json,
)
from text_generation_router.api.openai.chat_pieces import NewId, delta_json, ending_of, message_json, new_id_for
from text_generation_router.api.openai.chat_prompt import chat_prompt
from text_generation_router.api.openai.fields import CHAT_BODY
from text_generation_router.api.openai.schemas import ChatOptions
from text_generation_router.http.caller import Caller
from text_generation_router.http.sse import DirectWriter
from text_generation_router.text.tokens.events import TokenEvent
from text_generation_router.text.tokens.pieces import CallStart, NewestCall, Text
from text_generation_router.text.validation import Prompt

KIND = "chat.completion"
NAMES = v1_request.NAMES | {"inputs": "messages", "top_n_tokens": "top_logprobs"}


class ChatRoutes:
    """The route of chats, which also provides the steps that differ between routes (see `AnswerDialect`)."""

    body_kind = CHAT_BODY
    refused_requests = 2  # requests to count for a refused body: the same number as for one text

    def __init__(self, services: Services) -> None:
        self._services = services
        self._style = services.style
        self._logprobs = ChatLogprobs(services.inference.vocabulary, has_bytes=not services.style.is_tgis)
        self._new_id = new_id_for(services.chat_formats.reading.calls)

    def num_requests(self, asked: ChatOptions) -> int:
        return 1 + asked.choices

    async def prompts(self, asked: ChatOptions, caller: Caller) -> Sequence[Prompt]:
        names = NAMES if asked.max_completion_tokens is None else NAMES | {"max_new_tokens": "max_completion_tokens"}
        return [await chat_prompt(self._services, asked, caller, names)]

    def events(
        self, asked: ChatOptions, generations: Sequence[Generation], writer: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        dialect = self._services.dialects.of("/v1/chat/completions")
        return until_done(self._chunks(asked, generations, writer), dialect)

    async def answer(self, asked: ChatOptions, results: Sequence[Generation]) -> dict[str, Any]:
        answer = self._head(KIND, asked) | {
            "choices": [await self._choice(index, result, asked) for index, result in enumerate(results)],
            "usage": usage_json(results, asked.choices) | reasoning_json(results),
        }
        if asked.prompt_logprobs is not None:
            answer["prompt_logprobs"] = await prompt_logprobs_json(results[0], asked.prompt_logprobs)
        if asked.return_token_ids:
            answer["prompt_token_ids"] = results[0].input_ids
        return answer

    def _head(self, kind: str, asked: ChatOptions) -> dict[str, Any]:
        model = self._services.served_name
        if self._style.is_tgis and asked.model not in (None, "tgi"):
            model = asked.model  # as in TGI: the request's `model`, the name of an adapter
        return chunk_json(kind, self._style.identity("chatcmpl"), model, self._services.system_fingerprint)

    async def _choice(self, index: int, result: Generation, asked: ChatOptions) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": self._message(result),
            "logprobs": await self._logprobs.of_text(rows_of(result, asked.top_logprobs, self._style))
            if asked.logprobs
            else None,
            "finish_reason": ending_of(result.finish.reason, NewestCall(result.pieces), self._style),
        }
        return choice | {"token_ids": [token.id for token in result.tokens]} if asked.return_token_ids else choice

    def _message(self, result: Generation) -> dict[str, Any]:
        if result.is_divided and self._style.is_tgis:
            return tgi_calls.message_json(result.pieces, result.finish.generated_text)
        if result.is_divided:
            return message_json(result.pieces, self._new_id)
        return {"role": "assistant", "content": result.finish.generated_text}

    async def _chunks(
        self, asked: ChatOptions, generations: Sequence[Generation], writer: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        head = self._head(f"{KIND}.chunk", asked)
        write = ChunkWriter(head, asked, self._style, extra=b',"usage":null' if self._style.is_tgis else b"")
        encoders = [self._encoder(index, generation, asked, write) for index, generation in enumerate(generations)]
        if len(generations) == 1:  # `merged` orders the events of several texts
            generations[0].write_through(writer, encoders[0])
        try:
            if asked.return_token_ids:
                yield write.prompt_ids(generations[0].input_ids)
            async for index, event in merged(generations):
                if encoded := encoders[index](event):
                    yield encoded
            if asked.include_usage:
                yield write.usage(generations, reasoning_json(generations))
        finally:
            close_all(generations)

    def _encoder(self, index: int, generation: Generation, asked: ChatOptions, write: ChunkWriter) -> "ChatEncoder":
        if generation.reader is not None and not self._style.is_tgis:
            return PieceEncoder(index, generation, asked, write, self._logprobs, new_id=self._new_id)
        encoder = ChatEncoder if generation.reader is None else TgiCallEncoder
        return encoder(index, generation, asked, write, self._logprobs)


@dataclass(eq=False)
class ChatEncoder:
    """Encodes the events of one text of a stream. In OpenAI's style the first chunk has the role and the last one the
    finish reason, each without text; in TGI's every chunk has the role, and the last text's chunk the finish reason."""

    index: int
    generation: Generation
    asked: ChatOptions
    write: ChunkWriter
    logprobs: ChatLogprobs
    _has_begun: bool = False

    def __post_init__(self) -> None:
        self._made = Made(self.generation)

    def __call__(self, event: TokenEvent) -> bytes:
        reason = None if event.finish is None else self.write.style.reasons[event.finish.reason]
        if self.write.style.is_tgis:
            return self._text(event, {"role": "assistant", "content": event.text}, reason)
        first = self._first()
        text = self._text(event, {"content": event.text}, None)
        return first + text if reason is None else first + text + self._chunk({}, None, reason)

    def _first(self, content: str | None = "") -> bytes:
        """The first chunk of the stream, which has the role; empty if the first chunk was made before."""
        has_begun, self._has_begun = self._has_begun, True
        return b"" if has_begun else self._chunk({"role": "assistant", "content": content}, None, None)

    def _text(self, event: TokenEvent, delta: dict[str, Any], reason: str | None) -> bytes:
        self._made.add(event)
        logprobs, ids = self._token(event)
        return self._chunk(delta, logprobs, reason, ids)

    def _token(self, event: TokenEvent) -> tuple[dict[str, Any] | None, list[int] | None]:
        """The token's log-probabilities and its id, if the request asks for them."""
        token = event.token
        row = None
        if self.asked.logprobs and token is not None:
            row = row_of(token, event.top_tokens, self.asked.top_logprobs, self.write.style)
        logprobs = self.logprobs.of_token(row) if row is not None else None
        ids = [token.id] if self.asked.return_token_ids and token is not None else None
        return logprobs, ids

    def _chunk(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None, ids: list[int] | None = None
    ) -> bytes:
        choice = {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self.write.chunk(choice if ids is None else choice | {"token_ids": ids}, self._made)


@dataclass(eq=False, kw_only=True)
class PieceEncoder(ChatEncoder):
    """Encodes the events of a text that is divided into pieces: a chunk for each piece. A token's log-probabilities are
    in the first of its chunks, or in a chunk without text if the token's text is held back. The first chunk has the
    content null, as OpenAI's streams of calls have, unless the answer begins with text. A last chunk makes it "" if
    neither a text nor a call has come."""

    new_id: NewId
    _call: NewestCall = field(default_factory=NewestCall)
    _has_content: bool = False  # whether any chunk until now has text or a call

    def __call__(self, event: TokenEvent) -> bytes:
        pieces = self.generation.pieces_of(event)
        self._call.add(pieces)
        deltas = [delta_json(piece, self.new_id) for piece in pieces]
        logprobs, ids = self._token(event)
        if not deltas and (logprobs is not None or ids is not None):
            deltas = [{}]
        begins_with_text = bool(pieces) and isinstance(pieces[0], Text)
        chunks = self._first("" if begins_with_text else None) if deltas or event.finish is not None else b""
        self._has_content |= any(isinstance(piece, Text | CallStart) for piece in pieces)
        self._made.add(event)
        for delta in deltas:
            chunks += self._chunk(delta, logprobs, None, ids)
            logprobs = ids = None
        if event.finish is None:
            return chunks
        last = {} if self._has_content else {"content": ""}
        return chunks + self._chunk(last, None, ending_of(event.finish.reason, self._call, self.write.style))


class TgiCallEncoder(ChatEncoder):
    """Encodes a tool call, which a grammar has made, as TGI does. Unlike in TGI, the last chunk has the finish
    reason."""

    @cached_property
    def _id(self) -> str:
        return tgi_calls.stream_id(self.asked)

    def __call__(self, event: TokenEvent) -> bytes:
        delta = tgi_calls.delta_json(self.generation.pieces_of(event), self._id)
        reason = None if event.finish is None else self.write.style.reasons[event.finish.reason]
        if delta is None and reason is None and not (self.asked.logprobs or self.asked.return_token_ids):
            self._made.add(event)
            return b""
        return self._text(event, delta or {"role": "assistant", "content": ""}, reason)


def reasoning_json(made: Sequence[Generation]) -> dict[str, Any]:
    """The field of `usage` with the number of reasoning tokens, or no field if the answers are not divided into
    reasoning and text."""
    if not any(text.is_divided for text in made):
        return {}
    return {"completion_tokens_details": {"reasoning_tokens": sum(text.reasoning_tokens for text in made)}}
