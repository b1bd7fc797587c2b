"""A simulation as text for a terminal, beside its table: memory over time, and a histogram of times to the first
token.
"""

from collections.abc import Sequence

import numpy as np

from text_generation_benchmark.output import aligned_table
from text_generation_benchmark.simulation.report import Run
from text_generation_benchmark.simulation.trace import Floats

WIDTH = 48  # characters of the line over time; a terminal of 80 columns shows the whole table
BAR_WIDTH = 40
EIGHTHS = " ▁▂▃▄▅▆▇█"
# Upper edges of the histogram's bins, in seconds.
EDGES_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, float("inf"))


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
