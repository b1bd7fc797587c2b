"""Fifteen minutes of an engine, or of all engines of a front, in a ring of numbers: one sample each second."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from text_generation_router.engine.protocol import Engine
from text_generation_router.http.gate import Gate
from text_generation_router.metrics.instruments import StepSeries
from text_generation_router.metrics.metrics import METHODS, Metrics

NUM_SAMPLES, EVERY_S = 900, 1.0
# The columns of a sample. The last four are those of an engine in this process, and 0 for engines elsewhere.
COLUMNS = (
    "open",  # requests that this process answers
    "running",
    "waiting",
    "free_slots",
    "waiting_tokens",
    "computing_tokens",
    "wait_s",
    "ready",
    "tokens_per_s",
    "token_gap_ms",
    "steps_per_s",
    "step_ms",
)


class Rates:
    """What was added to a histogram since the last look: how many values, and their mean."""

    def __init__(self, series: Sequence[StepSeries]) -> None:
        self._series = series
        self._count, self._sum = self._totals()

    def _totals(self) -> tuple[float, float]:
        return sum(sum(one.counts) for one in self._series), sum(one.sum for one in self._series)

    def take(self) -> tuple[float, float]:
        count, total = self._totals()
        added, more = count - self._count, total - self._sum
        self._count, self._sum = count, total
        return added, more / added if added else 0.0


class History:
    """`run` is to be started as a task. The samples are the only work of the view that is done without a viewer."""

    def __init__(self, engine: Engine, gate: Gate, metrics: Metrics) -> None:
        self._engine = engine
        self._gate = gate
        self._gaps = Rates([metrics.time_between_tokens.series])
        self._steps = Rates([metrics.batch_inference_duration.labels(method=method) for method in METHODS])
        self._ring = np.zeros((NUM_SAMPLES, len(COLUMNS)), dtype=np.float32)
        self._num = 0

    async def run(self, clock: Callable[[], float] | None = None) -> None:
        clock = clock or asyncio.get_running_loop().time
        due_s = clock()
        while True:
            self.sample()
            due_s = max(due_s + EVERY_S, clock())
            await asyncio.sleep(due_s - clock())

    def sample(self) -> None:
        load, (tokens, gap_s), (steps, step_s) = self._engine.load(), self._gaps.take(), self._steps.take()
        self._ring[self._num % NUM_SAMPLES] = (
            self._gate.num_unfinished,
            load.running,
            load.waiting,
            load.free_slots,
            load.waiting_tokens,
            load.computing_tokens,
            load.wait_s,
            load.is_ready,
            tokens / EVERY_S,
            1000 * gap_s,
            steps / EVERY_S,
            1000 * step_s,
        )
        self._num += 1

    def table(self) -> dict[str, list[float]]:
        """The samples as columns, oldest first."""
        start = self._num % NUM_SAMPLES if self._num >= NUM_SAMPLES else 0
        rows = np.roll(self._ring, -start, axis=0)[: min(self._num, NUM_SAMPLES)]
        rounded = np.round(rows.astype(np.float64), 3)
        return {name: rounded[:, place].tolist() for place, name in enumerate(COLUMNS)}
