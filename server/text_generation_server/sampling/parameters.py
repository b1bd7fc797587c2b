"""How each request chooses its next token, and which row that holds for. All of it on the host."""

from dataclasses import dataclass

from text_generation_server.errors import StepError

SMALLEST_DIVISOR = 1e-6
MAX_BIASES = 1024


@dataclass(frozen=True, slots=True)
class Parameters:
    """One request's choice; the defaults are neutral. `greedy` takes the most likely token."""

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
    bias: tuple[tuple[int, float], ...] = ()  # what is added to the logits of some tokens, each of them named once

    @property
    def cuts(self) -> bool:
        """Whether tokens may be left out, which needs an order among them."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.typical_p < 1.0

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0

    @property
    def divisor(self) -> float:
        """Of the logits. Below the smallest the best token is certain already, and infinities would come out."""
        return 1.0 if self.greedy else max(self.temperature, SMALLEST_DIVISOR)

    @property
    def positive_repetition_penalty(self) -> float:
        return max(self.repetition_penalty, SMALLEST_DIVISOR)

    @property
    def signed_seed(self) -> int:
        """uint64 on the wire; the same 64 bits as a signed number."""
        return self.seed - (1 << 64) if self.seed >= 1 << 63 else self.seed


def check_bias(bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    """StepError for what cannot be added to logits."""
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
    """The choices of all rows. `version` changes with any of them, so that what was made of them can be kept."""

    def __init__(self, count: int) -> None:
        self.version = 0
        self.of_row = [Parameters()] * count
        self.prompt_length = [0] * count

    def set(self, row: int, parameters: Parameters, prompt_length: int) -> None:
        self.version += 1
        self.of_row[row] = parameters
        self.prompt_length[row] = prompt_length
