"""Draws a simulation as PNG: memory over time, times to the first token, longest gaps, goodput."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from text_generation_benchmark.plots import label, save, sheet
from text_generation_benchmark.simulation.report import Run, Setting
from text_generation_benchmark.simulation.trace import Floats


def draw(setting: Setting, runs: Sequence[Run], bucket_s: float, path: Path) -> None:
    figure, (memory, goodput, first_token, gap) = sheet(2, 2)
    figure.suptitle(
        f"{setting.load}\n{setting.model.name}, {setting.engines} × {setting.limits.capacity:,} slots", fontsize=9
    )
    several = len({run.rate for run in runs}) > 1
    for run in runs:
        name = f"{run.policy}, {run.rate:g}/s" if several else run.policy
        use = run.summary.kv_use_over_time
        memory.plot(np.arange(len(use)) * bucket_s, use * 100, label=name, linewidth=1)
        _plot_share(first_token, run.summary.first_token_s, name)
        _plot_share(gap, run.summary.longest_gap_s, name)
    label(memory, "slots held by requests", "s", "% of all slots")
    label(first_token, "requests whose first token came within", "s", "%")
    label(gap, "requests without a gap above", "s", "%")
    first_token.axvline(setting.targets.first_token_s, color="grey", linestyle=":")
    gap.axvline(setting.targets.gap_s, color="grey", linestyle=":")
    _plot_goodput(goodput, runs)
    save(figure, path)


def _plot_share(axes: Axes, ordered_s: Floats, name: str) -> None:
    axes.plot(ordered_s, np.linspace(0, 100, len(ordered_s)), label=name, linewidth=1)
    axes.set_xscale("log")


def _plot_goodput(axes: Axes, runs: Sequence[Run]) -> None:
    """Plots bars if there is one rate, and lines if there are several."""
    policies = dict.fromkeys(run.policy for run in runs)
    for policy in policies:
        own = [run for run in runs if run.policy == policy]
        if len(own) == 1:
            axes.bar(policy, own[0].summary.goodput)
        else:
            axes.plot([run.rate for run in own], [run.summary.goodput for run in own], marker="o", label=policy)
    label(axes, "goodput", "requests a second", "good requests a second")
