"""This version and another one, measured in turns: whether a change has cost speed."""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.figures import FEWEST_TURNS, Interval, median_interval
from text_generation_benchmark.load import Dialect, LoadResult
from text_generation_benchmark.ours import LAUNCHER, running_ours
from text_generation_benchmark.output import table
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.shapes import SHAPES
from text_generation_benchmark.workload import PREFILL, Run, Workload, loads_on

WORKLOADS = (Workload(1), Workload(16), Workload(64))
# The guard's loads are short: more turns show more than longer ones.
GUARD_WORKLOADS = (Workload(1, new_tokens=64), Workload(16, new_tokens=64), PREFILL)
# A guarded version may be this much slower.
MAX_LOSS = 0.05


@dataclass(frozen=True, slots=True)
class Turns:
    """The results of one load. Results with the same index were measured one right after the other."""

    workload: Workload
    before: list[LoadResult]
    now: list[LoadResult]

    @property
    def speed(self) -> Interval:
        """Ratio of tokens per second: this version ÷ the version before."""
        return self._median(lambda now, before: now.tokens_per_s / before.tokens_per_s)

    @property
    def later_ms(self) -> Interval:
        """Difference of the time to the first token in milliseconds: this version - the version before."""
        return self._median(lambda now, before: 1000 * (now.first_token_s - before.first_token_s))

    @property
    def first_token(self) -> Interval:
        """Ratio of the time to the first token: this version ÷ the version before."""
        return self._median(lambda now, before: now.first_token_s / before.first_token_s)

    def _median(self, compare: Callable[[LoadResult, LoadResult], float]) -> Interval:
        return median_interval(list(map(compare, self.now, self.before)))

    @property
    def has_lost(self) -> bool:
        """Whether even the upper bound of the speed is a loss of more than MAX_LOSS."""
        return self.speed.high < 1 - MAX_LOSS

    @property
    def is_sure(self) -> bool:
        """Whether a loss of more than MAX_LOSS would have been seen."""
        return self.has_lost or self.speed.low >= 1 - MAX_LOSS


def take_turns(before: Run, now: Run, workloads: Sequence[Workload], turns: int, seconds: float = 0) -> list[Turns]:
    """At least `turns` turns of each load, until `seconds` are over: one of each load after the other, so that a slow
    minute of the machine meets all loads. The version that goes first alternates, so that neither always follows the
    other."""
    end = time.monotonic() + seconds
    found = [Turns(workload, [], []) for workload in workloads]
    turn = 0
    while turn < turns or time.monotonic() < end:
        for each in found:
            for run in (before, now) if not turn else ():
                run(replace(each.workload, new_tokens=4))
            sides = [(before, each.before), (now, each.now)]
            for run, results in sides if turn % 2 else reversed(sides):
                results.append(run(each.workload))
        turn += 1
    return found


@dataclass(frozen=True, slots=True)
class Side:
    """One of two servers that are compared: the text-generation-launcher of its version, and more flags."""

    launcher: Path = LAUNCHER
    flags: Sequence[str] = ()


def compare_servers(
    before: Side, now: Side, shape: str, dialect: Dialect, workloads: Sequence[Workload], turns: int, seconds: float = 0
) -> list[Turns]:
    if turns < FEWEST_TURNS:
        raise ValueError(f"--turns {turns}: a median with its interval needs {FEWEST_TURNS}")
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder, ExitStack() as servers:
        model = Path(folder) / shape
        write_checkpoint(model, SHAPES[shape])
        prompts = Prompts(model)
        one, two = (
            loads_on(servers.enter_context(running_ours(model, side.launcher, side.flags)).port, dialect, prompts)
            for side in (before, now)
        )
        return take_turns(one, two, workloads, turns, seconds)


def launcher_of(other: Path) -> Path:
    """The launcher of another checkout. FileNotFoundError if it has none."""
    launcher = other if other.is_file() else other / ".venv" / "bin" / "text-generation-launcher"
    if not launcher.exists():
        raise FileNotFoundError(f"{launcher} does not exist: run `make install` in the other checkout")
    return launcher.absolute()


def as_markdown(all_turns: Sequence[Turns]) -> str:
    head = ("streams", "turns", "tokens/s before", "now", "now ÷ before (95 %)", "first token, now ÷ before (95 %)")
    lines = []
    for turns in all_turns:
        before, now = (median(r.tokens_per_s for r in results) for results in (turns.before, turns.now))
        counts = (turns.workload.concurrency, len(turns.now), f"{before:.1f}", f"{now:.1f}")
        lines.append([str(cell) for cell in (*counts, turns.speed, turns.first_token, turns.later_ms)])
    return table((*head, "ms later (95 %)"), lines)


def verdicts(all_turns: Sequence[Turns]) -> str:
    lines = []
    for turns in all_turns:
        load, speed = turns.workload, turns.speed
        what = (
            f"{load.input_tokens:,}-token prompts/s"
            if load.new_tokens == 1
            else f"{load.concurrency} streams, tokens/s"
        )
        said = "SLOWER" if turns.has_lost else "kept"
        if not turns.is_sure:
            said = f"noise could hide a loss of {1 - speed.low:.0%}"
        lines.append(f"{what}: now ÷ before {speed} (95 %), {len(turns.now)} turns: {said}")
    return "\n".join(lines)
