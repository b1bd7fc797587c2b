"""The fields of an answer about its prompt: its text (`echo`), and the log-probabilities of its tokens
(`prompt_logprobs`, and `echo` with `logprobs`).
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from text_generation_router.api.common.generation import Generation, Row
from text_generation_router.api.openai.answers import TextSizes
from text_generation_router.api.openai.schemas import OpenAIRequest
from text_generation_router.http.encoding import ROWS_PER_PIECE
from text_generation_router.text.tokens.events import Token


def wanted_logprobs(asked: OpenAIRequest, echoed: int | None = None) -> int | None:
    """Number of most likely tokens that are wanted with each log-probability of the prompt; None if none is wanted.
    `echoed`: the number that `echo` needs."""
    wanted = [count for count in (asked.prompt_logprobs, echoed) if count is not None]
    return max(wanted) if wanted else None


async def text_of_prompt(given: str | tuple[int, ...], tokenizer: Tokenizer, skip_special_tokens: bool) -> str:
    """The prompt as it is repeated: the text that was sent, or the text of the tokens that were sent."""
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
    """Where each token begins in the text of a prompt. A special token that the tokenizer has added has length 0."""
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
