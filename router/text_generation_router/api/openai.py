"""What OpenAI's two generating routes have in common: usage, finish reasons, log-probabilities."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import accumulate, islice
from typing import Any

import numpy as np

from text_generation_common.tasks import cancelled
from text_generation_router.api.generation import Generation, Row, Timing
from text_generation_router.errors import InferenceError
from text_generation_router.http.dialects import OPENAI
from text_generation_router.http.encoding import DONE, rows_json, to_json
from text_generation_router.text.events import FinishReason, Token, TokenEvent


def finish_reason(reason: FinishReason) -> str:
    """OpenAI's word for an end-of-sequence token; TGI's words for the other reasons."""
    return "stop" if reason is FinishReason.EOS_TOKEN else reason.value


def usage_json(timings: Sequence[Timing]) -> dict[str, Any]:
    prompt = sum(timing.prompt_tokens for timing in timings)
    made = sum(timing.generated_tokens for timing in timings)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": sum(timing.cached_tokens for timing in timings)},
    }


def chunk_json(kind: str, model: str, fingerprint: str) -> dict[str, Any]:
    """The first fields of every answer. `id` is empty, as in TGI."""
    return {"object": kind, "id": "", "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}


def start_of_choices(head: dict[str, Any]) -> bytes:
    """The bytes of a chunk up to its choice, which are the same for a whole stream."""
    return to_json(head)[:-1] + b',"choices":['


def chat_logprobs(row: Row) -> dict[str, Any]:
    """Log-probabilities of one token, in the form of OpenAI's chats. `all_chat_logprobs` has the log-probabilities of a
    whole text.
    """
    return {"content": [_chat_row(row)]}


async def all_chat_logprobs(rows: Sequence[Row]) -> dict[str, Any]:
    return {"content": await rows_json(rows, _chat_row)}


def _chat_row(row: Row) -> dict[str, Any]:
    token, others = row
    return _named_logprob(token) | {"top_logprobs": [_named_logprob(other) for other in others]}


def _named_logprob(token: Token) -> dict[str, Any]:
    return {"token": token.text, "logprob": np.float32(token.logprob)}


def completion_logprobs(row: Row, offset: int) -> dict[str, Any]:
    """Log-probabilities of one token, in the form of OpenAI's completions. `text_offset` counts characters of the
    choice's text; `top_logprobs` contains the token itself as well."""
    return {name: [value_of(row)] for name, value_of in COMPLETION_ARRAYS.items()} | {"text_offset": [offset]}


async def all_completion_logprobs(rows: Sequence[Row]) -> dict[str, Any]:
    arrays = {name: await rows_json(rows, value_of) for name, value_of in COMPLETION_ARRAYS.items()}
    ends = accumulate((len(token.text) for token, _ in rows), initial=0)
    return arrays | {"text_offset": list(islice(ends, len(rows)))}


def _top_logprobs(row: Row) -> dict[str, Any]:
    token, others = row
    return {other.text: np.float32(other.logprob) for other in (*others, token)}


COMPLETION_ARRAYS: dict[str, Callable[[Row], Any]] = {
    "tokens": lambda row: row[0].text,
    "token_logprobs": lambda row: np.float32(row[0].logprob),
    "top_logprobs": _top_logprobs,
}


async def until_done(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """A whole stream: `events`, of which an error becomes another event, and `[DONE]` in every case."""
    try:
        async for event in events:
            yield event
    except InferenceError as error:
        yield OPENAI.event(error)
    finally:
        await events.aclose()
    yield DONE


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, TokenEvent], None]:
    """Events of all generations as they arrive, each with its generation's index. Raises the first error."""
    if len(generations) == 1:
        async for event in generations[0]:
            yield 0, event
        return
    ready: asyncio.Queue[tuple[int, TokenEvent | InferenceError | None]] = asyncio.Queue(maxsize=len(generations))
    pumps = [asyncio.create_task(_pump(index, generation, ready)) for index, generation in enumerate(generations)]
    try:
        running = len(pumps)
        while running:
            index, item = await ready.get()
            if isinstance(item, InferenceError):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        await cancelled(*pumps)


async def _pump(
    index: int, generation: Generation, ready: asyncio.Queue[tuple[int, TokenEvent | InferenceError | None]]
) -> None:
    try:
        async for event in generation:
            await ready.put((index, event))
    except InferenceError as error:
        await ready.put((index, error))
    else:
        await ready.put((index, None))
