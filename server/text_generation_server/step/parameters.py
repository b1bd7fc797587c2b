"""The kernels' arguments that follow from a request's `Sampling`, and the parameters of all rows. All of them are on
the host.
"""

import math

from text_generation_common.sampling import NEUTRAL, Sampling
from text_generation_server.errors import StepError

SMALLEST_DIVISOR = 1e-6
MAX_BIASES = 1024


def cuts(sampling: Sampling) -> bool:
    """Whether top-k, top-p, min-p or typical-p may exclude tokens."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0 or sampling.typical_p < 1.0


def penalizes(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0


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


def check_bias(bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    """Checks a bias. StepError if it cannot be added to logits."""
    if len(bias) > MAX_BIASES:
        raise StepError(f"a request has a logit bias for {len(bias)} tokens: at most {MAX_BIASES} are taken")
    tokens = {token for token, _ in bias}
    if len(tokens) < len(bias):
        raise StepError("a logit bias names a token twice: give each token one value")
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise StepError(f"a logit bias names a token that is not one of the {vocab_size} of the vocabulary")
    if any(not abs(value) < float("inf") for _, value in bias):
        raise StepError("a logit bias is not a finite number: use -100 to make a token all but impossible")


class RowParameters:
    """The parameters of all rows. `version` changes when the parameters of any row change, so that plans made from them
    can be kept.
    """

    def __init__(self, count: int) -> None:
        self.version = 0
        self.of_row = [NEUTRAL] * count
        self.prompt_length = [0] * count
        # Number of most likely tokens that are listed with each log-probability of a token of the prompt. None: the row
        # wants no log-probabilities of its prompt.
        self.prompt_logprobs: list[int | None] = [None] * count

    def set(self, row: int, sampling: Sampling, prompt_length: int, prompt_logprobs: int | None = None) -> None:
        self.version += 1
        self.of_row[row] = sampling
        self.prompt_length[row] = prompt_length
        self.prompt_logprobs[row] = prompt_logprobs
