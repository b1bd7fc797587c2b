"""Parts of the answers of OpenAI's two generating routes: usage, chunks, log-probabilities."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from types import MappingProxyType
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from text_generation_common.tasks import cancelled
from text_generation_router.api.common.generation import Generation, Row
from text_generation_router.api.common.styles import Style
from text_generation_router.api.openai.schemas import OpenAIRequest
from text_generation_router.errors import InferenceError
from text_generation_router.http.dialects import ErrorDialect
from text_generation_router.http.encoding import DONE, ROWS_PER_PIECE, rows_json, to_event, to_event_with, to_json
from text_generation_router.text.tokens.detokenization import Vocabulary
from text_generation_router.text.tokens.events import Token, TokenEvent


def usage_json(results: Sequence[Generation], copies: int) -> dict[str, Any]:
    """The `usage` of an answer. `results`: all texts, `copies` for each prompt, with the texts of a prompt next to each
    other. Each prompt is counted once."""
    firsts = results[::copies]
    made = sum(result.finish.generated_tokens for result in results)
    return _usage(sum(result.prompt_tokens for result in firsts), made) | {
        "prompt_tokens_details": {"cached_tokens": sum(result.finish.cached_tokens for result in firsts)}
    }


def _usage(prompt: int, made: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def chunk_json(kind: str, identity: str, model: str, fingerprint: str) -> dict[str, Any]:
    """The fields with which every answer and every chunk begins."""
    return {
        "object": kind,
        "id": identity,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }


class Made:
    """Counts the tokens of one text of a stream."""

    def __init__(self, generation: Generation) -> None:
        self.prompt_tokens = generation.prompt_tokens
        self.tokens = 0

    def add(self, event: TokenEvent) -> None:
        self.tokens += event.token is not None

    def usage(self) -> dict[str, Any]:
        return _usage(self.prompt_tokens, self.tokens)


class ChunkWriter:
    """Writes the chunks of a stream. The fields that are the same in each chunk are encoded once."""

    def __init__(self, head: dict[str, Any], asked: OpenAIRequest, style: Style, extra: bytes = b"") -> None:
        """`extra`: fields of every chunk behind its choice."""
        self.style = style
        self._head = head
        self._start = to_json(head)[:-1] + b',"choices":['
        self._copies = asked.choices
        # OpenAI's chunks have the field `usage` if it was asked for.
        self._end = b"]" + (extra or (b',"usage":null' if asked.include_usage and not style.is_tgis else b"")) + b"}"
        self._has_usage = asked.continuous_usage

    def chunk(self, choice: dict[str, Any], made: Made) -> bytes:
        if self._has_usage:
            return to_event(self._head | {"choices": [choice], "usage": made.usage()})
        return to_event_with(self._start, choice, self._end)

    def tgi_completion(self, choice: dict[str, Any], result: Generation | None) -> bytes:
        """A chunk of a completion in TGI's form, in which the last chunk of each prompt has its usage. `result`: None
        for other chunks."""
        if result is None:
            return to_event_with(self._start, choice, b"]}")
        return to_event(self._head | {"choices": [choice], "usage": usage_json([result], 1)})

    def usage(self, results: Sequence[Generation], details: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        """A chunk with the usage of the whole request. `results`: as for `usage_json`. `details`: other fields of the
        usage."""
        return to_event(self._head | {"choices": [], "usage": {**usage_json(results, self._copies), **details}})

    def prompt_ids(self, ids: Sequence[int]) -> bytes:
        return to_event(self._head | {"choices": [], "prompt_token_ids": ids})


def row_of(token: Token, others: tuple[Token, ...], count: int | None, style: Style) -> Row:
    """A token, and the `count` most likely tokens at its position; in TGI's style more, if several are equally
    likely."""
    return token, others if style.is_tgis else others[:count]


def rows_of(result: Generation, count: int | None, style: Style) -> list[Row]:
    return [row_of(token, others, count, style) for token, others in result.rows]


class ChatLogprobs:
    """Log-probabilities in the form of OpenAI's chats."""

    def __init__(self, vocabulary: Vocabulary, has_bytes: bool) -> None:
        """`has_bytes`: whether each token has the field `bytes`, as in OpenAI's answers but not in TGI's."""
        self._vocabulary = vocabulary
        self._has_bytes = has_bytes

    def of_token(self, row: Row) -> dict[str, Any]:
        return {"content": [self.of_row(row)]}

    async def of_text(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {"content": await rows_json(rows, self.of_row)}

    def of_row(self, row: Row) -> dict[str, Any]:
        token, others = row
        return self._named(token) | {"top_logprobs": [self._named(other) for other in others]}

    def _named(self, token: Token) -> dict[str, Any]:
        named = {"token": token.text, "logprob": np.float32(token.logprob)}
        return named | {"bytes": list(self._vocabulary.bytes_of(token.id))} if self._has_bytes else named


def completion_logprobs(row: Row, offset: int) -> dict[str, Any]:
    """Log-probabilities of one token, in the form of OpenAI's completions. `text_offset` counts characters of the
    choice's text, also those that a stop string may yet cut off; `top_logprobs` contains the token itself as well."""
    return {name: [value_of(row)] for name, value_of in COMPLETION_ARRAYS.items()} | {"text_offset": [offset]}


async def all_completion_logprobs(rows: Sequence[Row], offsets: Sequence[int]) -> dict[str, Any]:
    """Log-probabilities of several tokens in the form of OpenAI's completions. `offsets`: text offset of each token."""
    arrays = {name: await rows_json(rows, value_of) for name, value_of in COMPLETION_ARRAYS.items()}
    return arrays | {"text_offset": offsets}


@dataclass(frozen=True, slots=True)
class TextSizes:
    """Number of characters that each token takes in a text. `has_special`: special tokens are part of the text."""

    vocabulary: Vocabulary
    has_special: bool

    def held_back(self, token: Token) -> int:
        """Number of characters before a special token that were held back until it came."""
        return len(token.text) - len(self.vocabulary.text_of(token.id))

    def of(self, token: Token) -> int:
        return self.held_back(token) if token.special and not self.has_special else len(token.text)

    def offsets(self, rows: Sequence[Row], start: int) -> list[int]:
        """Text offsets of the rows' tokens, if the first token begins at `start`."""
        return list(islice(accumulate((self.of(token) for token, _ in rows), initial=start), len(rows)))


def _top_logprobs(row: Row) -> dict[str, Any] | None:
    token, others = row
    if math.isnan(token.logprob):  # the first token of a prompt follows nothing
        return None
    return {other.text: np.float32(other.logprob) for other in (*others, token)}


COMPLETION_ARRAYS: dict[str, Callable[[Row], Any]] = {
    "tokens": lambda row: row[0].text,
    "token_logprobs": lambda row: np.float32(row[0].logprob),
    "top_logprobs": _top_logprobs,
}


async def until_done(events: AsyncGenerator[bytes, None], dialect: ErrorDialect) -> AsyncGenerator[bytes, None]:
    """A whole stream: `events`, then `[DONE]`. If `events` raises an error, an event with the error comes before
    `[DONE]`."""
    try:
        async for event in events:
            yield event
    except InferenceError as error:
        yield dialect.event(error)
    finally:
        await events.aclose()
    yield DONE


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, TokenEvent], None]:
    """Events of all generations as they arrive, each with its generation's index. Raises the first error."""
    if len(generations) == 1:
        async for event in generations[0]:
            yield 0, event
        return
    ready: asyncio.Queue[tuple[int, TokenEvent | Exception | None]] = asyncio.Queue(maxsize=len(generations))
    pumps = [asyncio.create_task(_pump(index, generation, ready)) for index, generation in enumerate(generations)]
    try:
        running = len(pumps)
        while running:
            index, item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        await cancelled(*pumps)


async def _pump(
    index: int, generation: Generation, ready: asyncio.Queue[tuple[int, TokenEvent | Exception | None]]
) -> None:
    try:
        async for event in generation:
            await ready.put((index, event))
    except Exception as error:
        await ready.put((index, error))
        raise
    else:
        await ready.put((index, None))


# The fields of an answer about its prompt: its text (`echo`), and the log-probabilities of its tokens
# (`prompt_logprobs`, and `echo` with `logprobs`).
def wanted_logprobs(asked: OpenAIRequest, echoed: int | None = None) -> int | None:
    """Number of most likely tokens to report with each log-probability of the prompt; None: the prompt's
    log-probabilities are not reported. `echoed`: the number that `echo` needs."""
    wanted = [count for count in (asked.prompt_logprobs, echoed) if count is not None]
    return max(wanted) if wanted else None


async def text_of_prompt(given: str | tuple[int, ...], tokenizer: Tokenizer, skip_special_tokens: bool) -> str:
    """The prompt as `echo` repeats it: the text that was sent, or the text of the tokens that were sent."""
    if isinstance(given, str):
        return given
    return await asyncio.to_thread(tokenizer.decode, list(given), skip_special_tokens=skip_special_tokens)


async def rows_of_prompt(rows: Sequence[Row], count: int) -> list[Row]:
    """The rows of a prompt, each with its `count` most likely tokens. The event loop does other work in between."""
    made: list[Row] = []
    for at in range(0, len(rows), ROWS_PER_PIECE):
        if at:
            await asyncio.sleep(0)
        made += [(token, others[:count]) for token, others in rows[at : at + ROWS_PER_PIECE]]
    return made


def offsets_in(text: str, rows: Sequence[Row], sizes: TextSizes) -> list[int]:
    """Text offset of each token in the text of a prompt. A special token that the tokenizer has added has length 0."""
    offsets, at = [], 0
    for token, _ in rows:
        offsets.append(at)
        held_back = sizes.held_back(token) if token.special else 0
        is_there = not token.special or text.startswith(token.text[held_back:], at + held_back)
        at += len(token.text) if is_there else held_back
    return offsets


async def prompt_logprobs_json(result: Generation, count: int) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token of the prompt an object with the token itself and its `count` most likely
    alternatives, by id; null for the first token, which has no token before it."""
    assert result.prompt is not None
    rows = await rows_of_prompt(result.prompt, count)
    return [None if math.isnan(token.logprob) else _by_id(token, others) for token, others in rows]


def _by_id(token: Token, others: Sequence[Token]) -> dict[str, Any]:
    ranks = {other.id: rank for rank, other in enumerate(others, start=1)}
    return {
        str(one.id): {"logprob": np.float32(one.logprob), "rank": ranks.get(one.id), "decoded_token": one.text}
        for one in (*others, *(() if token.id in ranks else (token,)))
    }
