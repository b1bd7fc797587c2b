"""The tables of the benchmark of shards as plots."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from text_generation_benchmark.plots import Line, against_load, save, sheet
from text_generation_benchmark.shards.tables import LATENCIES, THROUGHPUTS, Results, Round, summarize


def draw_shards(results: Results, path: Path) -> None:
    """The tables of the benchmark of shards."""
    drawing, plots = sheet(1, 2)
    for axes, figures, title, unit in zip(
        plots, (LATENCIES, THROUGHPUTS), ("latency", "throughput"), ("ms", "tokens/s"), strict=True
    ):
        against_load(axes, title, "requests in a batch", unit, _means(results, figures))
        if figures is LATENCIES:
            axes.set_yscale("log")
    save(drawing, path)


def _means(results: Results, figures: Mapping[str, str]) -> list[Line]:
    """A line for each step, at the batch sizes that were measured."""
    measured = {size: rounds for size, rounds in results.measured.items() if rounds}
    return [
        (step, list(measured), [_mean(rounds, figure) for rounds in measured.values()])
        for step, figure in figures.items()
    ]


def _mean(rounds: Sequence[Round], figure: str) -> float:
    return summarize([getattr(done, figure) for done in rounds])["Average"]
