"""This version and another one, measured in turns: whether a change has cost speed."""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.load import GREEDY, Dialect, Event, GenerateStream, LoadResult
from text_generation_benchmark.ours import LAUNCHER, running_ours
from text_generation_benchmark.output import table
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.shapes import SHAPES
from text_generation_benchmark.workload import Run, Workload, loads_on

WORKLOADS = (Workload(1), Workload(16), Workload(64))
CONFIDENCE = 0.95
FEWEST_TURNS = 6  # with fewer values, a median has no interval of this confidence


class TenMessages:
    """A dialect that sends each prompt as a chat of ten messages, through the model's chat template."""

    path = "/v1/chat/completions"

    def body(self, prompt: str, new_tokens: int, sampling: Mapping[str, float] = GREEDY) -> dict[str, Any]:
        size = -(-len(prompt) // 10)
        texts = [prompt[i * size : (i + 1) * size] for i in range(10)]
        roles = ["system", *["user", "assistant"] * 4, "user"]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        fixed = {"messages": messages, "max_tokens": new_tokens, "temperature": 0, "stream": True}
        return fixed | {"ignore_eos": True} | dict(sampling)

    def read(self, event: dict[str, Any], new_tokens: int) -> Event:
        return Event(tokens=len(event["choices"]))


DIALECTS: dict[str, Dialect] = {"generate": GenerateStream(), "chat": TenMessages()}


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and bounds that contain the true median with a probability of at least CONFIDENCE."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def median_interval(values: Sequence[float]) -> Interval:
    """Assumes nothing about the distribution: the true median lies below the k-th smallest of n values only if fewer
    than k values fell below it, each with probability 1/2. ValueError for fewer than FEWEST_TURNS values."""
    ordered = sorted(values)
    n = len(ordered)
    if n < FEWEST_TURNS:
        raise ValueError(f"{n} values: an interval needs {FEWEST_TURNS}")
    outside, below = 0.0, 0  # probability that the interval without the `below` values at each end misses the median
    while outside + 2 * math.comb(n, below) / 2**n <= 1 - CONFIDENCE:
        outside += 2 * math.comb(n, below) / 2**n
        below += 1
    return Interval(median(ordered), ordered[below - 1], ordered[n - below])


@dataclass(frozen=True, slots=True)
class Turns:
    """The results of one load. Results with the same index were measured one right after the other."""

    workload: Workload
    before: Sequence[LoadResult]
    now: Sequence[LoadResult]

    @property
    def speeds(self) -> list[float]:
        """Ratios of tokens per second: this version ÷ the version before."""
        return [now.tokens_per_s / before.tokens_per_s for now, before in zip(self.now, self.before, strict=True)]

    @property
    def speed(self) -> Interval:
        return median_interval(self.speeds)

    @property
    def later_ms(self) -> Interval:
        """Difference of the time to the first token in milliseconds: this version - the version before."""
        pairs = zip(self.now, self.before, strict=True)
        return median_interval([1000 * (now.first_token_s - before.first_token_s) for now, before in pairs])

    @property
    def first_token(self) -> Interval:
        """Ratio of the time to the first token: this version ÷ the version before."""
        pairs = zip(self.now, self.before, strict=True)
        return median_interval([now.first_token_s / before.first_token_s for now, before in pairs])


def take_turns(before: Run, now: Run, workload: Workload, turns: int, warm_up: bool = True) -> Turns:
    """The version that goes first alternates, so that neither always follows the other."""
    for run in (before, now) if warm_up else ():
        run(replace(workload, new_tokens=4))
    results: dict[Run, list[LoadResult]] = {before: [], now: []}
    for turn in range(turns):
        for run in (before, now) if turn % 2 else (now, before):
            results[run].append(run(workload))
    return Turns(workload, results[before], results[now])


@contextmanager
def both_versions(before: Path, shape: str, dialect: Dialect) -> Iterator[tuple[Run, Run]]:
    """`before` is the other version's text-generation-launcher. Both servers are up within the context."""
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder, ExitStack() as servers:
        model = Path(folder) / shape
        write_checkpoint(model, SHAPES[shape])
        prompts = Prompts(model)
        runs = [
            loads_on(servers.enter_context(running_ours(model, launcher)).port, dialect, prompts)
            for launcher in (before, LAUNCHER)
        ]
        yield runs[0], runs[1]


def compare_versions(before: Path, shape: str, dialect: Dialect, turns: int) -> list[Turns]:
    if turns < FEWEST_TURNS:
        raise ValueError(f"--turns {turns}: a median with its interval needs {FEWEST_TURNS}")
    with both_versions(before, shape, dialect) as (other, this):
        return [take_turns(other, this, workload, turns) for workload in WORKLOADS]


def as_markdown(all_turns: Sequence[Turns]) -> str:
    head = ("streams", "turns", "tokens/s before", "now", "now ÷ before (95 %)", "first token, now ÷ before (95 %)")
    lines = []
    for turns in all_turns:
        before, now = (median(r.tokens_per_s for r in results) for results in (turns.before, turns.now))
        counts = (turns.workload.concurrency, len(turns.now), f"{before:.1f}", f"{now:.1f}")
        lines.append([str(cell) for cell in (*counts, turns.speed, turns.first_token, turns.later_ms)])
    return table((*head, "ms later (95 %)"), lines)
