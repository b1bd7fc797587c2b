"""Tokens per second of many live replicas beside one, with pretended shards, on the same machine in turns."""

import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from text_generation_benchmark.load import GenerateStream
from text_generation_benchmark.output import say, table
from text_generation_benchmark.process import ChildServer
from text_generation_benchmark.replicas.processes import LiveReplicas, live_replicas
from text_generation_benchmark.router.reading import WriterTime, measure_writer, request_bytes

MOST_STEP_MS = 500.0
MOST_BUSY = 0.6  # part of the cores' time beyond which the cores would limit, not the replicas
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


def measure_replicated(
    model: Path, counts: Sequence[int], num_fronts: int, streams: int, seconds: float, turns: int, step_ms: float
) -> list[Throughput]:
    """`streams` streams for each replica. The steps are made longer until the cores are at most MOST_BUSY busy with the
    most replicas."""
    while True:
        measured = _measure(model, counts, num_fronts, streams, seconds, turns, step_ms)
        busiest = max(each.busy for each in measured)
        if busiest <= MOST_BUSY:
            return measured
        if step_ms >= MOST_STEP_MS:
            raise RuntimeError(
                f"the cores are {busiest:.0%} busy even with steps of {step_ms:g} ms: other programs run"
            )
        say(f"the cores are {busiest:.0%} busy with steps of {step_ms:g} ms: again, with slower shards")
        step_ms = float(round(step_ms * max(1.25, busiest / MOST_BUSY)))


def _measure(
    model: Path, counts: Sequence[int], num_fronts: int, streams: int, seconds: float, turns: int, step_ms: float
) -> list[Throughput]:
    measured = []
    with (
        tempfile.TemporaryDirectory(prefix="tgi-bench-") as name,
        live_replicas(model, Path(name), max(counts), str(step_ms / 1000)) as replicas,
    ):
        for _ in range(turns):
            for count in counts:
                one = _one_turn(replicas, count, num_fronts, streams, seconds, step_ms)
                say(f"{count} replicas: {one.tokens_per_s:,.0f} tokens/s, cores {one.busy:.0%} busy")
                measured.append(one)
                if one.busy > MOST_BUSY:
                    return measured
    return measured


def _one_turn(
    replicas: LiveReplicas, count: int, num_fronts: int, streams: int, seconds: float, step_ms: float
) -> Throughput:
    with replicas.fronts(num_fronts, engines=count) as fronts:
        tokens_per_s, busy = uvloop.run(_read_all(fronts, count * streams, seconds))
    return Throughput(count, num_fronts, step_ms, tokens_per_s, busy)


async def _read_all(fronts: Sequence[ChildServer], streams: int, seconds: float) -> tuple[float, float]:
    request = request_bytes(GenerateStream())
    parts = [len(range(number, streams, len(fronts))) for number in range(len(fronts))]
    reads = [
        asyncio.create_task(measure_writer(front.pid, front.port, request, part, seconds))
        for front, part in zip(fronts, parts, strict=True)
    ]
    # All streams have begun when the first measurement is about to end, at the latest.
    busy = asyncio.create_task(_busy_at_the_end(reads, seconds))
    times: list[WriterTime] = [each for each, _ in await asyncio.gather(*reads)]
    return sum(each.tokens / each.wall_s for each in times), await busy


async def _busy_at_the_end(reads: Sequence[asyncio.Task[tuple[WriterTime, bytes]]], seconds: float) -> float:
    """The busy part of windows of a tenth of the measurement: the mean of the last five before it ends."""
    shares: list[float] = []
    while not any(read.done() for read in reads):
        cores = BusyCores()
        await asyncio.wait(reads, timeout=seconds / 10, return_when=asyncio.FIRST_COMPLETED)
        shares.append(cores.share())
    return statistics.mean(shares[-6:-1] or shares)


HEAD = ("replicas", "fronts", "ms per step", "tokens/s", "times one replica", "cores busy")


def as_markdown(measured: Sequence[Throughput], streams: int) -> str:
    counts = sorted({each.replicas for each in measured})
    medians = {
        count: statistics.median(each.tokens_per_s for each in measured if each.replicas == count) for count in counts
    }
    lines = [
        (
            str(count),
            str(measured[0].fronts),
            f"{measured[0].step_ms:g}",
            f"{medians[count]:,.0f}",
            f"{medians[count] / medians[counts[0]] * counts[0]:.2f}",
            f"{max(each.busy for each in measured if each.replicas == count):.0%}",
        )
        for count in counts
    ]
    turns = sum(each.replicas == counts[0] for each in measured)
    about = f"{streams} streams for each replica, {os.cpu_count()} cores, medians of {turns} turns, greatest busy part."
    return f"{about}\n\n{table(HEAD, lines)}"
