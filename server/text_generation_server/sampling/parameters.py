"""The sampling parameters of each request, and of each row. All of them are on the host."""

from dataclasses import dataclass

from text_generation_server.errors import StepError

SMALLEST_DIVISOR = 1e-6
MAX_BIASES = 1024


@dataclass(frozen=True, slots=True)
class Parameters:
    """The sampling parameters of one request; the defaults are neutral. `greedy` takes the most likely token."""

    greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    seed: int = 0
    watermark: bool = False
    top_n_tokens: int = 0
    bias: tuple[tuple[int, float], ...] = ()  # (token, number added to its logit), each token at most once

    @property
    def cuts(self) -> bool:
        """Whether top-k, top-p, min-p or typical-p may leave tokens out, for which a row must be sorted."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.typical_p < 1.0

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0

    @property
    def divisor(self) -> float:
        """Divisor of the logits. Smaller numbers would give infinities, and the best token is certain already."""
        return 1.0 if self.greedy else max(self.temperature, SMALLEST_DIVISOR)

    @property
    def positive_repetition_penalty(self) -> float:
        return max(self.repetition_penalty, SMALLEST_DIVISOR)

    @property
    def signed_seed(self) -> int:
        """The 64 bits of the seed, a uint64 in protobuf, as a signed number."""
        return self.seed - (1 << 64) if self.seed >= 1 << 63 else self.seed


def check_bias(bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    """StepError for a bias that cannot be added to logits."""
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
    """The parameters of all rows. `version` changes when any row's do, so that plans made from them can be kept."""

    def __init__(self, count: int) -> None:
        self.version = 0
        self.of_row = [Parameters()] * count
        self.prompt_length = [0] * count

    def set(self, row: int, parameters: Parameters, prompt_length: int) -> None:
        self.version += 1
        self.of_row[row] = parameters
        self.prompt_length[row] = prompt_length
