"""Measured rounds and their statistics. No input or output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Round:
    """Times of one prefill of `batch_size` equal prompts, and of the decode steps after it."""

    batch_size: int
    is_warmup: bool
    sequence_length: int  # number of tokens of each request's prompt
    decode_steps: int
    prefill_s: float
    decode_s: float  # seconds of all decode steps together

    @property
    def prefill_ms(self) -> float:
        return self.prefill_s * 1e3

    @property
    def decode_ms(self) -> float:
        return self.decode_s * 1e3

    @property
    def token_ms(self) -> float:
        """Mean milliseconds of one decode step, which makes one token for each request."""
        return self.decode_ms / self.decode_steps

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.batch_size * self.sequence_length / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        return self.batch_size * self.decode_steps / self.decode_s


@dataclass(frozen=True, slots=True)
class Series:
    """A figure of each round, and its name in the tables."""

    step: str
    value_of: Callable[[Round], float]


PREFILL_MS = Series("Prefill", lambda done: done.prefill_ms)
TOKEN_MS = Series("Decode (token)", lambda done: done.token_ms)
DECODE_MS = Series("Decode (total)", lambda done: done.decode_ms)
PREFILL_TOKENS_PER_S = Series("Prefill", lambda done: done.prefill_tokens_per_s)
DECODE_TOKENS_PER_S = Series("Decode", lambda done: done.decode_tokens_per_s)


@dataclass(frozen=True, slots=True)
class Summary:
    average: float
    lowest: float
    highest: float
    p50: float
    p90: float
    p99: float


def summarize(series: Series, rounds: Sequence[Round]) -> Summary:
    """Statistics of a series over at least one round. As in TGI, a percentile is one of the sorted values: element
    floor(p/100 · n).
    """
    values = sorted(series.value_of(done) for done in rounds)
    p50, p90, p99 = (values[percent * len(values) // 100] for percent in (50, 90, 99))
    return Summary(sum(values) / len(values), values[0], values[-1], p50, p90, p99)


@dataclass(slots=True)
class Results:
    """The rounds measured until now. `rounds_each`: rounds of each batch size, warm-ups included."""

    batch_sizes: tuple[int, ...]
    rounds_each: int
    measured: dict[int, list[Round]] = field(init=False)  # the measured rounds, by batch size
    finished: dict[int, int] = field(init=False)  # number of rounds, warm-ups included, by batch size

    def __post_init__(self) -> None:
        self.measured = {batch_size: [] for batch_size in self.batch_sizes}
        self.finished = dict.fromkeys(self.batch_sizes, 0)

    def add(self, done: Round) -> None:
        self.finished[done.batch_size] += 1
        if not done.is_warmup:
            self.measured[done.batch_size].append(done)
