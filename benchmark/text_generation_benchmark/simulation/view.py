"""What a terminal shows of a simulation: memory over time, and how long first tokens took."""

from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from text_generation_benchmark.simulation.report import Run
from text_generation_benchmark.simulation.trace import Floats

WIDTH = 48  # of the line over time; a terminal of 80 columns shows all of the table
BAR_WIDTH = 40
EIGHTHS = " ▁▂▃▄▅▆▇█"
# Upper edges of the histogram's bins, in seconds.
EDGES_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, float("inf"))


def picture(runs: Sequence[Run]) -> RenderableType:
    use = Table("admission", "requests/s", "slots held over time, of all", title="Memory")
    for run in runs:
        use.add_row(run.policy, f"{run.rate:g}", sparkline(run.summary.kv_use_over_time, WIDTH))
    return Group(use, *(part for run in runs for part in _first_tokens(run)))


def sparkline(shares: Floats, width: int) -> str:
    """Shares of 1, the mean of as many as come to lie on one character."""
    if not len(shares):
        return ""
    parts = np.array_split(shares, min(width, len(shares)))
    return "".join(EIGHTHS[min(8, int(np.ceil(8 * part.mean())))] for part in parts)


def _first_tokens(run: Run) -> tuple[RenderableType, RenderableType]:
    table = Table.grid(padding=(0, 1))
    counts = bins(run.summary.first_token_s)
    most = max(counts)
    for edge_s, count in zip(EDGES_S, counts, strict=True):
        label = f"≤ {edge_s:g}" if edge_s < float("inf") else f"> {EDGES_S[-2]:g}"
        table.add_row(Text(label, justify="right"), "█" * -(-count * BAR_WIDTH // max(1, most)), f"{count:,}")
    return f"\nSeconds to the first token, {run.policy}, {run.rate:g} requests/s:", table


def bins(ordered_s: Floats) -> list[int]:
    """How many of the sorted values are within each of EDGES_S, and above the one before it."""
    ends = np.searchsorted(ordered_s, EDGES_S, side="right")
    return [int(count) for count in np.diff(ends, prepend=0)]
