"""The use of every token slot: free, cached, cached and locked by a request, or held by one request alone."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.view.values import SlotRuns

FREE, CACHED, LOCKED, HELD = range(4)
# Most cells of a map, and the number of cells of a map that would have more than MAX_RUNS runs.
MAX_CELLS, FEW_CELLS, MAX_RUNS = 16_384, 2_048, 2_048

Uses = npt.NDArray[np.uint8]


def uses_of(scheduler: Scheduler) -> Uses:
    """The use of each slot. A slot that is neither free nor a request's own belongs to the prefix cache."""
    uses = np.logical_not(scheduler.memory.slots.is_free).astype(np.uint8)  # FREE or CACHED
    for request in scheduler.active:
        if request.holding is not None:
            uses[request.holding.slots] = LOCKED
    for request in scheduler.active:
        if request.holding is not None:
            uses[request.holding.private] = HELD
    return uses


def slot_runs_of(uses: Uses) -> SlotRuns:
    counts = tuple(int(np.count_nonzero(uses == use)) for use in range(HELD + 1))
    per_cell = -(-len(uses) // MAX_CELLS) or 1
    runs = _runs(uses, per_cell)
    if len(runs) > MAX_RUNS:
        per_cell = -(-len(uses) // FEW_CELLS)
        runs = _runs(uses, per_cell)
    return SlotRuns(len(uses), per_cell, runs, counts)


def _runs(uses: Uses, per_cell: int) -> tuple[int, ...]:
    cells = uses[::per_cell].copy()
    for place in range(1, per_cell):  # a third of the time of a maximum over each short row
        others = uses[place::per_cell]
        np.maximum(cells[: len(others)], others, out=cells[: len(others)])
    changes = np.flatnonzero(np.diff(cells)) + 1
    edges = [0, *changes.tolist(), len(cells)]
    return tuple(4 * (end - start) + int(cells[start]) for start, end in pairwise(edges) if end > start)
