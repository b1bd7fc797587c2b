"""The tables of `compare` as plots: latency and throughput against load, and the share of the limit."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from text_generation_benchmark.plots import Line, against_load, label, save, sheet
from text_generation_benchmark.report import Figure, Report, Row, first_token_s, per_token_s, tokens_per_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = "this server"


def draw_report(report: Report, path: Path) -> None:
    """The tables of `compare`: a row of plots for each model."""
    models = {row.model: [other for other in report.rows if other.model == row.model] for row in report.rows}
    drawing, plots = sheet(len(models), 4)
    for place, (model, rows) in enumerate(models.items()):
        loads = [row for row in rows if not row.is_prefill and not row.workload.is_sampled]
        speed, token, first, share = plots[4 * place : 4 * place + 4]
        against_load(speed, f"{model}: tokens a second", "streams", "tokens/s", _lines(report, loads, tokens_per_s, 1))
        against_load(token, f"{model}: time between tokens", "streams", "ms", _lines(report, loads, per_token_s, 1e3))
        against_load(first, f"{model}: first token", "streams", "ms", _lines(report, loads, first_token_s, 1e3))
        _draw_shares(share, model, rows)
    save(drawing, path)


def _lines(report: Report, rows: Sequence[Row], figure: Figure, unit: float) -> list[Line]:
    """A line for this server, and for each peer that has figures."""
    lines: list[Line] = [(OURS, _streams(rows), [unit * row.of_ours(figure) for row in rows])]
    for peer in report.peers:
        found = [(row, each) for row in rows if (each := row.beside(peer, figure, less_is_better=False)) is not None]
        if found:
            lines.append((peer.name, _streams([row for row, _ in found]), [unit * theirs for _, (theirs, _) in found]))
    return lines


def _streams(rows: Sequence[Row]) -> list[float]:
    return [row.workload.concurrency for row in rows]


def _draw_shares(axes: "Axes", model: str, rows: Sequence[Row]) -> None:
    """A bar for each load: how much of the least time that the machine allows the server took."""
    shares = {
        f"{row.workload.input_tokens} in" if row.is_prefill else f"{row.workload.concurrency}{_sampled(row)}": 100
        * (row.limit_of_prompts if row.is_prefill else row.limit_of_load)
        for row in rows
    }
    axes.bar(list(shares), list(shares.values()))
    axes.axhline(100, color="grey", linestyle=":")
    label(axes, f"{model}: share of the machine's limit", "streams, or tokens of a prompt", "%")


def _sampled(row: Row) -> str:
    return " sampled" if row.workload.is_sampled else ""
