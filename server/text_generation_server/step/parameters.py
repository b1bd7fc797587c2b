"""The kernels' arguments that follow from a request's `Sampling`, and the parameters of all rows. All of them are on
the host.
"""

import math

from text_generation_common.sampling import NEUTRAL, Sampling
from text_generation_server.step.token_lists import TokenLists, token_lists

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
