"""A simulation as a table in Markdown and, for a terminal, as pictures: memory over time, and a histogram of times to
the first token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from text_generation_benchmark.figures import percentile
from text_generation_benchmark.output import aligned_table, columns
from text_generation_benchmark.simulation.cost import SimulatedModel
from text_generation_benchmark.simulation.engine import ClusterSummary, Targets
from text_generation_benchmark.simulation.trace import Floats
from text_generation_router.scheduling.request import Limits

WIDTH = 48  # characters of the line over time; a terminal of 80 columns shows the whole table
BAR_WIDTH = 40
EIGHTHS = " ▁▂▃▄▅▆▇█"
# Upper edges of the histogram's bins, in seconds.
EDGES_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, float("inf"))


@dataclass(frozen=True, slots=True)
class Run:
    """The simulation of one policy under one rate of a load."""

    policy: str
    rate: float
    summary: ClusterSummary


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that all runs of a report have in common."""

    load: str
    duration_s: float
    model: SimulatedModel
    engines: int
    limits: Limits
    targets: Targets

    def __str__(self) -> str:
        limits, model = self.limits, self.model
        engines = f"{self.engines} engines, requests dealt in turn" if self.engines > 1 else "one engine"
        return (
            f"{self.load}; {self.duration_s:,.0f} s. {model.name} ({model.source}), {engines}; {limits.capacity:,}"
            f" slots, {limits.max_running:,} rows, {limits.max_batch_prefill_tokens:,} prompt tokens a step."
            f" {self.targets}"
        )


def as_markdown(setting: Setting, runs: Sequence[Run]) -> str:
    table = f"{setting}\n\n{columns(map(_cells, runs))}"
    best = {run.policy: max(each.summary.goodput for each in runs if each.policy == run.policy) for run in runs}
    if len(best) in (1, len(runs)):
        return table
    bests = ", ".join(f"{goodput:.2f} with {policy}" for policy, goodput in best.items())
    return f"{table}\n\nThe best of these rates, in good requests a second: {bests}."


def _cells(run: Run) -> dict[str, str]:
    summary, counters = run.summary, run.summary.counters
    prompt_tokens = counters.prefix_hit_tokens + counters.prefilled_tokens
    return {
        "requests/s": f"{run.rate:g}",
        "admission": run.policy,
        "good/s": f"{summary.goodput:.2f}",
        "done/s": f"{summary.requests_per_s:.2f}",
        "tokens/s": f"{summary.output_tokens_per_s:,.0f}",
        "first token ms p50, p99": _percentiles(summary.first_token_s, ",.0f"),
        "ms per token p50, p99": _percentiles(summary.mean_gap_s, ".1f"),
        "longest gap ms p50, p99": _percentiles(summary.longest_gap_s, ",.0f"),
        "slots held mean, most": f"{summary.kv_use:.0%}, {summary.max_kv_use:.0%}",
        "prompt tokens cached": f"{counters.prefix_hit_tokens / max(1, prompt_tokens):.0%}",
        "preemptions": f"{counters.preemptions:,}",
        "wasted tokens": f"{counters.recomputed_tokens + summary.wasted_rows:,}",
    }


def _percentiles(ordered_s: Floats, form: str) -> str:
    return ", ".join(f"{percentile(ordered_s, percent) * 1e3:{form}}" for percent in (50, 99))


def picture(runs: Sequence[Run]) -> str:
    memory = [(run.policy, f"{run.rate:g}", sparkline(run.summary.kv_use_over_time, WIDTH)) for run in runs]
    head = ("admission", "requests/s", "slots held over time, of all")
    return "\n\n".join([aligned_table([head, *memory]), *map(_first_tokens, runs)])


def sparkline(shares: Floats, width: int) -> str:
    """At most `width` characters, each the mean of an equal part of `shares` (0 to 1)."""
    if not len(shares):
        return ""
    parts = np.array_split(shares, min(width, len(shares)))
    return "".join(EIGHTHS[min(8, int(np.ceil(8 * part.mean())))] for part in parts)


def _first_tokens(run: Run) -> str:
    counts = bins(run.summary.first_token_s)
    most = max(1, *counts)
    lines = [f"Seconds to the first token, {run.policy}, {run.rate:g} requests/s:"]
    for edge_s, count in zip(EDGES_S, counts, strict=True):
        label = f"≤ {edge_s:g}" if edge_s < float("inf") else f"> {EDGES_S[-2]:g}"
        lines.append(f"{label:>6} {'█' * -(-count * BAR_WIDTH // most):{BAR_WIDTH}} {count:,}")
    return "\n".join(lines)


def bins(ordered_s: Floats) -> list[int]:
    """Number of the sorted values in each bin of EDGES_S. A value belongs to the first bin whose upper edge is not
    smaller.
    """
    ends = np.searchsorted(ordered_s, EDGES_S, side="right")
    return [int(count) for count in np.diff(ends, prepend=0)]
