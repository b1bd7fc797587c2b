"""Tokens per second of many live replicas beside one, with pretended shards, on the same machine in turns."""

import asyncio
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from text_generation_benchmark.live.processes import LiveProcesses
from text_generation_benchmark.live.reading import measure_writers, request_bytes
from text_generation_benchmark.load import GenerateStream
from text_generation_benchmark.output import say, table
from text_generation_benchmark.process import ChildServer
from text_generation_common.model_files import demo_directory

MAX_STEP_MS = 500.0
MAX_BUSY = 0.6  # part of the cores' time beyond which the cores would limit, not the replicas
CPU_LINE = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class Throughput:
    replicas: int
    fronts: int
    step_ms: float
    tokens_per_s: float
    busy: float  # part of all cores' time, other programs' use included


class BusyCores:
    """The part of all cores' time that is used, from its making on."""

    def __init__(self) -> None:
        self._idle, self._all = self._read()

    def share(self) -> float:
        idle, total = self._read()
        return 1 - (idle - self._idle) / max(1, total - self._all)

    def _read(self) -> tuple[int, int]:
        times = [int(each) for each in CPU_LINE.read_text().split("\n", 1)[0].split()[1:9]]
        return times[3] + times[4], sum(times)


@dataclass(frozen=True, slots=True)
class ThroughputPlan:
    """`streams`: for each replica. `seconds`: of each measurement, of which there are `turns` for each count."""

    counts: Sequence[int]
    fronts: int
    streams: int
    seconds: float
    turns: int


def measure_replicated(plan: ThroughputPlan, step_ms: float) -> list[Throughput]:
    """The steps are made longer until the cores are at most MAX_BUSY busy with the most replicas."""
    while True:
        measured = _measure(plan, step_ms)
        busiest = max(each.busy for each in measured)
        if busiest <= MAX_BUSY:
            return measured
        if step_ms >= MAX_STEP_MS:
            raise RuntimeError(
                f"the cores are {busiest:.0%} busy even with steps of {step_ms:g} ms: other programs run"
            )
        say(f"the cores are {busiest:.0%} busy with steps of {step_ms:g} ms: again, with slower shards")
        step_ms = float(round(step_ms * max(1.25, busiest / MAX_BUSY)))


def _measure(plan: ThroughputPlan, step_ms: float) -> list[Throughput]:
    measured = []
    with LiveProcesses(demo_directory(), are_apart=False) as processes:
        engines = processes.engines(max(plan.counts), str(step_ms / 1000))
        for count in [count for _ in range(plan.turns) for count in plan.counts]:
            with processes.fronts(plan.fronts, engines[:count]) as fronts:
                tokens_per_s, busy = uvloop.run(_read_all(fronts, count * plan.streams, plan.seconds))
            say(f"{count} replicas: {tokens_per_s:,.0f} tokens/s, cores {busy:.0%} busy")
            measured.append(Throughput(count, plan.fronts, step_ms, tokens_per_s, busy))
            if busy > MAX_BUSY:
                break
    return measured


async def _read_all(fronts: Sequence[ChildServer], streams: int, seconds: float) -> tuple[float, float]:
    pids, ports = [front.pid for front in fronts], [front.port for front in fronts]
    reading = asyncio.create_task(measure_writers(pids, ports, request_bytes(GenerateStream()), streams, seconds))
    # All streams have begun when the measurement is about to end, at the latest.
    busy = asyncio.create_task(_busy_at_the_end(reading, seconds))
    [used, *_], _ = await reading
    return used.tokens / used.wall_s, await busy


async def _busy_at_the_end(reading: asyncio.Task[Any], seconds: float) -> float:
    """The busy part of windows of a tenth of the measurement: the mean of the last five before it ends."""
    shares: list[float] = []
    while not reading.done():
        cores = BusyCores()
        await asyncio.wait([reading], timeout=seconds / 10)
        shares.append(cores.share())
    return statistics.mean(shares[-6:-1] or shares)


def as_markdown(measured: Sequence[Throughput], streams: int) -> str:
    counts = sorted({each.replicas for each in measured})
    by_count = {count: [each for each in measured if each.replicas == count] for count in counts}
    medians = {count: statistics.median(each.tokens_per_s for each in own) for count, own in by_count.items()}
    least = min(medians)
    lines = [
        {
            "replicas": str(count),
            "fronts": str(own[0].fronts),
            "ms per step": f"{own[0].step_ms:g}",
            "tokens/s": f"{medians[count]:,.0f}",
            "times one replica": f"{medians[count] / medians[least] * least:.2f}",
            "cores busy": f"{max(each.busy for each in own):.0%}",
        }
        for count, own in by_count.items()
    ]
    turns = len(by_count[least])
    about = f"{streams} streams for each replica, {os.cpu_count()} cores, medians of {turns} turns, greatest busy part."
    return f"{about}\n\n{table(list(lines[0]), [list(line.values()) for line in lines])}"
