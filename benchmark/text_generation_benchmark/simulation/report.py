"""The table of a simulation, in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from text_generation_benchmark.output import aligned_table
from text_generation_benchmark.simulation.cost import SimulatedModel
from text_generation_benchmark.simulation.metrics import ClusterSummary, Targets, percentile
from text_generation_benchmark.simulation.trace import Floats
from text_generation_router.scheduling.limits import Limits

HEAD = (
    "requests/s",
    "admission",
    "good/s",
    "done/s",
    "tokens/s",
    "first token ms p50, p99",
    "ms per token p50, p99",
    "longest gap ms p50, p99",
    "slots held mean, most",
    "prompt tokens cached",
    "preemptions",
    "wasted tokens",
)


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


def as_markdown(setting: Setting, runs: Sequence[Run]) -> str:
    table = f"{_heading(setting)}\n\n{aligned_table([HEAD, *map(_cells, runs)])}"
    best = {run.policy: max(each.summary.goodput for each in runs if each.policy == run.policy) for run in runs}
    if len(best) in (1, len(runs)):
        return table
    bests = ", ".join(f"{goodput:.2f} with {policy}" for policy, goodput in best.items())
    return f"{table}\n\nThe best of these rates, in good requests a second: {bests}."


def _heading(setting: Setting) -> str:
    limits, targets, model = setting.limits, setting.targets, setting.model
    engines = f"{setting.engines} engines, requests dealt in turn" if setting.engines > 1 else "one engine"
    return (
        f"{setting.load}; {setting.duration_s:,.0f} s. {model.name} ({model.source}), {engines};"
        f" {limits.capacity:,} slots, {limits.max_running:,} rows, {limits.max_batch_prefill_tokens:,} prompt tokens a"
        f" step. Good: first token within {targets.first_token_s:g} s, no gap above {targets.gap_s:g} s."
    )


def _cells(run: Run) -> list[str]:
    summary = run.summary
    prompt_tokens = summary.prefix_hit_tokens + summary.prefilled_tokens
    return [
        f"{run.rate:g}",
        run.policy,
        f"{summary.goodput:.2f}",
        f"{summary.requests_per_s:.2f}",
        f"{summary.output_tokens_per_s:,.0f}",
        _percentiles(summary.first_token_s, ",.0f"),
        _percentiles(summary.mean_gap_s, ".1f"),
        _percentiles(summary.longest_gap_s, ",.0f"),
        f"{summary.kv_use:.0%}, {summary.most_kv_use:.0%}",
        f"{summary.prefix_hit_tokens / max(1, prompt_tokens):.0%}",
        f"{summary.preemptions:,}",
        f"{summary.recomputed_tokens + summary.wasted_rows:,}",
    ]


def _percentiles(ordered_s: Floats, form: str) -> str:
    return ", ".join(f"{percentile(ordered_s, percent) * 1e3:{form}}" for percent in (50, 99))
