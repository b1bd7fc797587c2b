"""Measured rounds, their statistics, and TGI's three tables in Markdown. No input or output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean

from text_generation_benchmark.figures import percentile
from text_generation_benchmark.output import Row, aligned_table
from text_generation_benchmark.shards.config import Plan
from text_generation_router.text.validation import AskedSampling

LATENCIES = {"Prefill": "prefill_ms", "Decode (token)": "token_ms", "Decode (total)": "decode_ms"}
THROUGHPUTS = {"Prefill": "prefill_tokens_per_s", "Decode": "decode_tokens_per_s"}
EXTREMES, PERCENTILES = ("Average", "Lowest", "Highest"), ("p50", "p90", "p99")


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


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Statistics of at least one value. As in TGI, a percentile is one of the sorted values."""
    ordered = sorted(values)
    extremes = {"Average": mean(ordered), "Lowest": ordered[0], "Highest": ordered[-1]}
    return extremes | {name: percentile(ordered, int(name[1:])) for name in PERCENTILES}


def tables(model: str, plan: Plan, asked: AskedSampling, results: Results) -> str:
    """All three tables. Batch sizes without a measured round are left out."""
    rows = {
        "Model": model,
        "Sequence Length": str(plan.sequence_length),
        "Decode Length": str(plan.decode_length),
        "Top N Tokens": _option(asked, "top_n_tokens"),
        "N Runs": str(plan.runs),
        "Warmups": str(plan.warmups),
        "Temperature": _option(asked, "temperature"),
        "Top K": _option(asked, "top_k"),
        "Top P": _option(asked, "top_p"),
        "Typical P": _option(asked, "typical_p"),
        "Repetition Penalty": _option(asked, "repetition_penalty"),
        "Frequency Penalty": _option(asked, "frequency_penalty"),
        "Watermark": str(asked.values.watermark).lower(),
        "Do Sample": str(asked.values.do_sample).lower(),
    }
    parameters = aligned_table([("Parameter", "Value"), *rows.items()])
    latencies = _statistics(results, LATENCIES, (*EXTREMES, *PERCENTILES), "ms")
    return "\n\n\n".join([parameters, latencies, _statistics(results, THROUGHPUTS, EXTREMES, "tokens/secs")])


def _statistics(results: Results, figures: Mapping[str, str], names: Sequence[str], unit: str) -> str:
    rows = []
    for step, figure in figures.items():
        for batch_size, measured in results.measured.items():
            if measured:
                summary = summarize([getattr(done, figure) for done in measured])
                rows.append((step, str(batch_size), *(f"{summary[name]:.2f} {unit}" for name in names)))
    return aligned_table([("Step", "Batch Size", *names), *merged(rows)])


def merged(rows: Sequence[Row]) -> list[Row]:
    """A cell that equals the cell above it is left empty, as in TGI's tables."""
    if not rows:
        return []
    return [
        rows[0],
        *(["" if cell == over else cell for over, cell in zip(*pair, strict=True)] for pair in pairwise(rows)),
    ]


def _option(asked: AskedSampling, name: str) -> str:
    """The value of an optional sampling parameter in Rust's notation, as TGI's benchmark prints it: `Some(0.9)` or
    `None`."""
    return f"Some({getattr(asked.values, name)})" if name in asked.given else "None"
