"""The kernels' arguments that follow from a request's `Sampling`, and the parameters of all rows. All of them are on
the host. What a request asks of single tokens (bias, the only tokens that it allows, tokens that it bans) becomes
arrays once, when the request joins, because a step's arguments are laid out again whenever a row joins or leaves.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from text_generation_common.sampling import NEUTRAL, Sampling
from text_generation_server.errors import StepError

Int32s = npt.NDArray[np.int32]
MAX_LISTED = 1024  # most ids in each list of a request
MAX_END_TOKENS = 2 * MAX_LISTED  # the request's own ids, and those of the model
ALWAYS = int(np.iinfo(np.int32).max)  # no text has this number of tokens


@dataclass(frozen=True, slots=True)
class TokenLists:
    """The lists of one request, as numbers of 32 bits.

    Ban e: token banned[e] cannot be chosen while the output has fewer than until[e] tokens and the history ends with
    the sizes[e] ids of this ban in `before`, where the ids of all bans follow each other.
    """

    bias_tokens: Int32s
    bias_values: npt.NDArray[np.float32]
    allowed: Int32s
    banned: Int32s
    until: Int32s
    sizes: Int32s
    before: Int32s


def token_lists(sampling: Sampling) -> TokenLists | None:
    """None if the request asks nothing of single tokens, as most requests do."""
    ends = sampling.end_token_ids if sampling.min_new_tokens else ()
    words = sampling.bad_words_ids
    if not (sampling.logit_bias or sampling.allowed_token_ids or words or ends):
        return None
    banned = [*ends, *(word[-1] for word in words)]
    until = [min(sampling.min_new_tokens, ALWAYS)] * len(ends) + [ALWAYS] * len(words)
    sizes = [0] * len(ends) + [len(word) - 1 for word in words]
    before = [token for word in words for token in word[:-1]]
    return TokenLists(
        _int32([token for token, _ in sampling.logit_bias]),
        np.array([value for _, value in sampling.logit_bias], np.float32),
        *map(_int32, (sampling.allowed_token_ids, banned, until, sizes, before)),
    )


def check_token_lists(sampling: Sampling, vocab_size: int) -> None:
    """StepError for lists that the kernels cannot take."""
    _check_bias(sampling.logit_bias, vocab_size)
    words = sampling.bad_words_ids
    word_tokens = [token for word in words for token in word]
    _check_ids("allowed tokens", sampling.allowed_token_ids, MAX_LISTED, vocab_size)
    _check_ids("bad words", word_tokens, MAX_LISTED, vocab_size)
    _check_ids("end tokens", sampling.end_token_ids, MAX_END_TOKENS, vocab_size)
    if not all(words):
        raise StepError("a bad word has no tokens: leave it out")


def _check_bias(bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    tokens = {token for token, _ in bias}
    _check_ids("a logit bias", [token for token, _ in bias], MAX_LISTED, vocab_size)
    if len(tokens) < len(bias):
        raise StepError("a logit bias names a token twice: give each token one value")
    if any(not abs(value) < float("inf") for _, value in bias):
        raise StepError("a logit bias is not a finite number: use -100 to make a token all but impossible")


def _check_ids(name: str, ids: tuple[int, ...] | list[int], most: int, vocab_size: int) -> None:
    if len(ids) > most:
        raise StepError(f"a request lists {len(ids)} tokens for {name}: at most {most} are taken")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise StepError(f"a request names a token for {name} that is not one of the {vocab_size} of the vocabulary")


def _int32(values: Iterable[int]) -> npt.NDArray[Any]:
    return np.array(list(values), np.int32)


SMALLEST_DIVISOR = 1e-6


def cuts(sampling: Sampling) -> bool:
    """Whether top-k, top-p, min-p or typical-p may exclude tokens."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0 or sampling.typical_p < 1.0


def penalizes(sampling: Sampling) -> bool:
    of_output = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    return sampling.repetition_penalty != 1.0 or of_output


def temperature(sampling: Sampling) -> float:
    """Divisor of the logits, at least SMALLEST_DIVISOR. A smaller one would give infinities, and would not change the
    choice: at SMALLEST_DIVISOR, the most likely token is certain.
    """
    return max(sampling.temperature, SMALLEST_DIVISOR) if sampling.do_sample else 1.0


def log_min_p(sampling: Sampling) -> float:
    return math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf


def repetition_penalty(sampling: Sampling) -> float:
    return max(sampling.repetition_penalty, SMALLEST_DIVISOR)


def signed_seed(sampling: Sampling) -> int:
    """The 64 bits of the seed, a uint64 in protobuf, as a signed integer."""
    return sampling.seed - (1 << 64) if sampling.seed >= 1 << 63 else sampling.seed


class RowParameters:
    """The parameters of all rows. `version` changes when the parameters of any row change, so that plans made from them
    can be kept.
    """

    def __init__(self, count: int) -> None:
        self.version = 0
        self.of_row = [NEUTRAL] * count
        self.lists: list[TokenLists | None] = [None] * count
        self.prompt_length = [0] * count
        # Number of most likely tokens that are listed with each log-probability of a token of the prompt. None: the row
        # wants no log-probabilities of its prompt.
        self.prompt_logprobs: list[int | None] = [None] * count

    def set(self, row: int, sampling: Sampling, prompt_length: int, prompt_logprobs: int | None = None) -> None:
        self.version += 1
        self.of_row[row] = sampling
        self.lists[row] = token_lists(sampling)
        self.prompt_length[row] = prompt_length
        self.prompt_logprobs[row] = prompt_logprobs
