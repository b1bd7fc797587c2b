"""Measures processor time per token of fronts and engine, and what a stopped front costs the streams of another one."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from text_generation_benchmark.fronts.apart import Apart, running_apart
from text_generation_benchmark.load import GenerateStream
from text_generation_benchmark.router.reading import Reader, WriterTime, measure_writers, reading_streams, request_bytes
from text_generation_benchmark.router.speed import on_core

# Seconds of a window in which tokens are counted. A front that reads nothing for 3 s is cut off by its engine.
WINDOW_S = 2.0
# Seconds from the stop of a front until its engine has cut it off, and ended its requests.
CUT_OFF_S = 5.0


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Microseconds of processor time for each token of all streams."""

    num_fronts: int  # 0: a router with the engine inside
    fronts: Sequence[WriterTime]
    engine: WriterTime | None

    @property
    def fronts_us(self) -> float:
        return sum(front.total_us for front in self.fronts)

    @property
    def engine_us(self) -> float:
        return self.engine.total_us if self.engine is not None else 0.0

    @property
    def total_us(self) -> float:
        return self.fronts_us + self.engine_us

    @property
    def tokens_per_s(self) -> float:
        return self.fronts[0].tokens / self.fronts[0].wall_s


def token_cost(model: Path, num_fronts: int, streams: int, seconds: float, step_s: float) -> TokenCost:
    with (
        tempfile.TemporaryDirectory(prefix="tgi-bench-") as name,
        running_apart(model, Path(name), num_fronts, step_s) as server,
        on_core(1),
    ):
        request = request_bytes(GenerateStream())
        times, _ = uvloop.run(measure_writers(server.pids, server.ports, request, streams, seconds))
    return TokenCost(num_fronts, times[: len(server.ports)], times[-1] if num_fronts else None)


@dataclass(frozen=True, slots=True)
class StoppedFront:
    """Mean seconds between two tokens of a stream at the other front."""

    before_s: float
    stopped_s: float  # while the front is stopped, and the engine still has its requests
    cut_off_s: float  # when they are gone

    @property
    def change(self) -> float:
        return self.stopped_s / self.before_s - 1


def stop_a_front(model: Path, turns: int, streams: int, step_s: float) -> list[StoppedFront]:
    """Two fronts with half of the streams each; one of them is stopped by SIGSTOP in each turn."""
    with (
        tempfile.TemporaryDirectory(prefix="tgi-bench-") as name,
        running_apart(model, Path(name), 2, step_s) as server,
        on_core(1),
    ):
        return [uvloop.run(_stop_once(server, turn % 2, streams)) for turn in range(turns)]


async def _stop_once(server: Apart, stopped: int, streams: int) -> StoppedFront:
    request, half = request_bytes(GenerateStream()), streams // 2
    front, other = server.fronts[stopped], server.fronts[1 - stopped]
    async with reading_streams([other.port], request, half) as readers:
        try:
            async with reading_streams([front.port], request, half):
                before_s = await _between_tokens(readers)
                os.kill(front.pid, signal.SIGSTOP)
                stopped_s = await _between_tokens(readers)
                await asyncio.sleep(CUT_OFF_S - WINDOW_S)
                cut_off_s = await _between_tokens(readers)
        finally:
            os.kill(front.pid, signal.SIGCONT)
    await asyncio.sleep(CUT_OFF_S)  # the front connects to its engine again
    return StoppedFront(before_s, stopped_s, cut_off_s)


async def _between_tokens(readers: Sequence[Reader]) -> float:
    loop, before = asyncio.get_running_loop(), sum(reader.events for reader in readers)
    started_s = loop.time()
    await asyncio.sleep(WINDOW_S)
    took_s = loop.time() - started_s
    return took_s * len(readers) / (sum(reader.events for reader in readers) - before)


def median_change(stops: Sequence[StoppedFront]) -> float:
    return median(stop.change for stop in stops)
