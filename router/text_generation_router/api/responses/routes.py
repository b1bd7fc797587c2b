"""POST /v1/responses, as OpenAI has it. Nothing is stored."""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from text_generation_common.logs import request_id
from text_generation_router.api.common.generation import Generation, Row
from text_generation_router.api.common.services import Services
from text_generation_router.api.common.styles import OPENAI_STYLE
from text_generation_router.api.openai.answers import ChatLogprobs, row_of, rows_of
from text_generation_router.api.openai.chat_prompt import chat_prompt
from text_generation_router.api.responses.chat import NAMES, chat_of
from text_generation_router.api.responses.fields import RESPONSES_BODY
from text_generation_router.api.responses.schemas import LOGPROBS, ResponsesOptions
from text_generation_router.api.responses.tools import call_names
from text_generation_router.api.responses.writer import ResponseStream, output_of
from text_generation_router.errors import InferenceError
from text_generation_router.http.caller import Caller
from text_generation_router.http.dialects import CODES, OPENAI
from text_generation_router.http.sse import DirectWriter
from text_generation_router.text.tokens.events import FinishReason, TokenEvent
from text_generation_router.text.tokens.pieces import Piece, Text
from text_generation_router.text.validation import Prompt, renaming

# Finds the tokens that make the text of an answer among the tokens of its reasoning, calls and markers.


class TextRows:
    """Collects the tokens of one answer. A token whose text is held back waits for the token that decides about it."""

    def __init__(self, is_divided: bool = True) -> None:
        """`is_divided` False: all tokens belong to the text."""
        self._is_divided = is_divided
        self._waiting: list[Row] = []

    def add(self, row: Row, pieces: Sequence[Piece]) -> list[Row]:
        """The tokens that the text among `pieces` is made of. `pieces`: what the token of `row` adds to the answer."""
        self._waiting.append(row)
        if not pieces:
            return []
        waiting, self._waiting = self._waiting, []
        return waiting[self._first(waiting, pieces) :] if self._is_divided else waiting

    def _first(self, waiting: Sequence[Row], pieces: Sequence[Piece]) -> int:
        """Index of the first waiting token that has made the text; tokens before it have made other pieces, or
        markers."""
        missing = sum(len(piece.text) for piece in pieces if isinstance(piece, Text))
        first = len(waiting)
        while first and missing > 0:
            first -= 1
            missing -= len(waiting[first][0].text)
        while 0 < first < len(waiting) and not waiting[first - 1][0].text:  # tokens that end within a character
            first -= 1
        return first

    def rest(self) -> list[Row]:
        """The waiting tokens, which have added no piece to the answer, such as the token that ended the text."""
        return self._waiting


def rows_by_message(rows: Sequence[Row], event_pieces: Sequence[Sequence[Piece]]) -> list[list[Row]]:
    """The tokens of each part of an answer's text: calls and reasoning divide it into parts. `event_pieces`: the pieces
    that each token adds to the answer, and at last the pieces that its end adds, if the answer does not end with a
    token."""
    found, messages, is_open = TextRows(), list[list[Row]](), False
    for i, pieces in enumerate(event_pieces):
        of_text = found.add(rows[i], pieces) if i < len(rows) else []
        for piece in pieces:
            if isinstance(piece, Text):
                if not is_open:
                    messages.append([])
                messages[-1] += of_text
                of_text = []
            is_open = isinstance(piece, Text)
    if is_open or not messages:
        messages = messages or [[]]
        messages[-1] += found.rest()
    return messages


COMPLETED = {"status": "completed"}
CUT_OFF = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}


class ResponsesRoutes:
    """The route of responses, which also provides the steps that differ between routes (see `AnswerDialect`)."""

    body_kind = RESPONSES_BODY
    refused_requests = 1

    def __init__(self, services: Services) -> None:
        self._services = services = services.without_tgi_dialect()
        self._logprobs = ChatLogprobs(services.inference.vocabulary, has_bytes=True)

    def num_requests(self, asked: ResponsesOptions) -> int:
        return 1

    async def prompts(self, asked: ResponsesOptions, caller: Caller) -> Sequence[Prompt]:
        with renaming(NAMES):
            return [await chat_prompt(self._services, chat_of(asked), caller, NAMES)]

    async def answer(self, asked: ResponsesOptions, results: Sequence[Generation]) -> dict[str, Any]:
        [result] = results
        ending = ending_of(result.finish.reason)
        names = call_names(asked.tools or ())
        output = output_of(result.pieces_of_text, request_id.get(), ending["status"], names)
        if has_logprobs(asked):
            rows = rows_of(result, asked.top_logprobs or 0, OPENAI_STYLE)
            messages = [item for item in output if item["type"] == "message"]
            parts = rows_by_message(rows, result.event_pieces) if result.is_divided else [rows]
            for message, part in zip(messages, parts, strict=False):  # an answer with calls only has no message
                message["content"][0]["logprobs"] = (await self._logprobs.of_text(part))["content"]
        return head_json(asked, self._services.served_name) | ending | {"output": output, "usage": usage_json(result)}

    async def events(
        self, asked: ResponsesOptions, generations: Sequence[Generation], writer: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        [generation] = generations
        head = head_json(asked, self._services.served_name)
        stream = ResponseStream(head, request_id.get(), call_names(asked.tools or ()))
        encode = ResponseEncoder(asked, generation, stream, self._logprobs)
        generation.write_through(writer, encode)
        try:
            yield stream.start()
            async for event in generation:
                if events := encode(event):
                    yield events
            yield encode.end()
        except InferenceError as error:
            status = OPENAI.note(error)
            yield stream.fail(CODES.get(status, "invalid_prompt" if status < 500 else "server_error"), error.text)
        finally:
            generation.close()


class ResponseEncoder:
    """Encodes the tokens of a stream."""

    def __init__(
        self, asked: ResponsesOptions, generation: Generation, stream: ResponseStream, logprobs: ChatLogprobs
    ) -> None:
        self._generation = generation
        self._stream = stream
        self._logprobs = logprobs if has_logprobs(asked) else None
        self._top_logprobs = asked.top_logprobs or 0
        self._rows = TextRows(generation.is_divided)

    def __call__(self, event: TokenEvent) -> bytes:
        pieces = self._generation.pieces_of(event)
        if self._logprobs is None or event.token is None:
            return self._stream.add(pieces)
        row = row_of(event.token, event.top_tokens, self._top_logprobs, OPENAI_STYLE)
        return self._stream.add(pieces, self._logprobs_of(self._rows.add(row, pieces)))

    def _logprobs_of(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        return [] if self._logprobs is None else [self._logprobs.of_row(row) for row in rows]

    def end(self) -> bytes:
        ending, usage = ending_of(self._generation.finish.reason), usage_json(self._generation)
        return self._stream.end(ending, usage, self._logprobs_of(self._rows.rest()))


def has_logprobs(asked: ResponsesOptions) -> bool:
    return LOGPROBS in (asked.include or ())


def head_json(asked: ResponsesOptions, model: str) -> dict[str, Any]:
    """The fields of an answer that do not depend on its text."""
    return {
        "id": f"resp_{request_id.get()}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "model": model,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
    } | asked.repeated()


def usage_json(result: Generation) -> dict[str, Any]:
    finish = result.finish
    return {
        "input_tokens": result.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finish.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finish.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": result.reasoning_tokens},
        "total_tokens": result.prompt_tokens + finish.generated_tokens,
    }


def ending_of(reason: FinishReason) -> dict[str, Any]:
    is_cut_off = reason in (FinishReason.LENGTH, FinishReason.DEADLINE)  # OpenAI's API has no reason for a deadline
    return CUT_OFF if is_cut_off else COMPLETED
