"""What it costs that fronts and their engine are processes of their own: speed, processor time per token, and what a
stopped front costs the streams of another one."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from text_generation_benchmark.live.processes import OTHER_CORE, START_S, LiveProcesses
from text_generation_benchmark.live.reading import Reader, WriterTime, measure_writers, reading_streams, request_bytes
from text_generation_benchmark.load import GenerateStream
from text_generation_benchmark.output import table
from text_generation_benchmark.process import ChildServer, on_core, wait_for
from text_generation_benchmark.turns import Side, Turns, compare_servers
from text_generation_benchmark.workload import Workload
from text_generation_common.model_files import demo_directory

PARTS = ("speed", "first", "time", "stopped")
SHAPE = "m100"
# One request at a time with a short prompt, so that the time to its first token is not that of other prompts.
FIRST = Workload(1, input_tokens=32, new_tokens=1)
FIRST_TURNS = 101
FRONTS = (0, 1, 2)
TIME_TURNS = 5
FIRST_LATER = "first token, ms later (95 %)"
# Seconds of a window in which tokens are counted. A front that reads nothing for 3 s is cut off by its engine.
WINDOW_S = 2.0
# Seconds from the stop of a front until its engine has cut it off, and ended its requests.
CUT_OFF_S = 5.0
# Requests at a time: the leases of all fronts together.
PERMITS = ("--max-concurrent-requests", "512")


@contextmanager
def running_apart(num_fronts: int, step_s: float) -> Iterator[tuple[list[ChildServer], ChildServer | None]]:
    """The fronts, each with a port of its own, so that a load can be divided, and their engine. `num_fronts` 0: a
    router with the engine inside. All processes but the shard have the first core, and this one the other."""
    with LiveProcesses(demo_directory(), are_apart=True) as processes:
        shard = processes.shard(str(step_s))
        if num_fronts:
            address, engine = processes.engine(shard, *PERMITS)
            wait_for(Path(address.removeprefix("unix://")), START_S)
            fronts = [processes.router("--engines", address, *PERMITS) for _ in range(num_fronts)]
        else:
            fronts, engine = [processes.router("--master-shard-uds-path", shard, *PERMITS)], None
        with on_core(OTHER_CORE):
            yield fronts, engine


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


def token_cost(num_fronts: int, streams: int, seconds: float, step_s: float) -> TokenCost:
    with running_apart(num_fronts, step_s) as (fronts, engine):
        pids, ports = [front.pid for front in fronts], [front.port for front in fronts]
        pids += [engine.pid] if engine is not None else []
        times, _ = uvloop.run(measure_writers(pids, ports, request_bytes(GenerateStream()), streams, seconds))
    return TokenCost(num_fronts, times[: len(ports)], times[-1] if num_fronts else None)


@dataclass(frozen=True, slots=True)
class StoppedFront:
    """Mean seconds between two tokens of a stream at the other front."""

    before_s: float
    stopped_s: float  # while the front is stopped, and the engine still has its requests
    cut_off_s: float  # when they are gone

    @property
    def change(self) -> float:
        return self.stopped_s / self.before_s - 1


def stop_a_front(turns: int, streams: int, step_s: float) -> list[StoppedFront]:
    """Two fronts with half of the streams each; one of them is stopped by SIGSTOP in each turn."""
    with running_apart(2, step_s) as (fronts, _):
        return [uvloop.run(_stop_once(fronts[turn % 2], fronts[1 - turn % 2], streams)) for turn in range(turns)]


async def _stop_once(front: ChildServer, other: ChildServer, streams: int) -> StoppedFront:
    request, half = request_bytes(GenerateStream()), streams // 2
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


def run_part(part: str, turns: int, seconds: float, streams: int, step_s: float) -> str:
    if part == "speed":
        return speed_table(compare_speed(Workload(streams), turns))
    if part == "first":
        return first_table(compare_speed(FIRST, FIRST_TURNS))
    if part == "time":
        return time_table(
            [[token_cost(count, streams, seconds, step_s) for count in FRONTS] for _ in range(TIME_TURNS)]
        )
    stops = stop_a_front(turns, streams, step_s)
    windows = [(stop.before_s, stop.stopped_s, stop.cut_off_s) for stop in stops]
    means = [f"{1000 * median(window):.2f}" for window in zip(*windows, strict=True)]
    head = ("turns", "ms between tokens: before", "one front stopped", "its requests ended", "change while stopped")
    changes = [stop.change for stop in stops]
    cell = f"{100 * median(changes):+.1f} % (largest {100 * max(map(abs, changes)):.1f} %)"
    return table(head, [[str(turns), *means, cell]])


def compare_speed(workload: Workload, turns: int) -> Turns:
    """One process with front and engine, and a front beside an engine, in turns, with a Llama of 100M parameters."""
    apart = Side(flags=("--api-workers", "1"))
    return compare_servers(Side(), apart, SHAPE, GenerateStream(), workloads=[workload], turns=turns)[0]


def speed_table(turns: Turns) -> str:
    head = ("streams", "turns", "tokens/s: one process", "front and engine", "ratio (95 %)", FIRST_LATER)
    one, two = (median(result.tokens_per_s for result in results) for results in (turns.before, turns.now))
    counts = (str(turns.workload.concurrency), str(len(turns.now)), f"{one:.1f}", f"{two:.1f}")
    return table(head, [[*counts, str(turns.speed), str(turns.later_ms)]])


def first_table(turns: Turns) -> str:
    head = ("turns", "first token, ms: one process", "front and engine", "ms later (95 %)")
    one, two = (1000 * median(result.first_token_s for result in results) for results in (turns.before, turns.now))
    return table(head, [[str(len(turns.now)), f"{one:.2f}", f"{two:.2f}", str(turns.later_ms)]])


def time_table(turns: Sequence[Sequence[TokenCost]]) -> str:
    """Each turn has one cost for each number of FRONTS."""
    head = ("processes", "tokens/s", "µs per token: fronts", "engine", "together", "beside 1 front")
    names = ("one", "engine, 1 front", *(f"engine, {count} fronts" for count in FRONTS[2:]))
    lines = []
    for place, name in enumerate(names):
        costs = [turn[place] for turn in turns]
        tokens_per_s = median(cost.tokens_per_s for cost in costs)
        times = [[getattr(cost, each) for cost in costs] for each in ("fronts_us", "engine_us", "total_us")]
        ratios = sorted(turn[place].total_us / turn[1].total_us for turn in turns)
        beside = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        lines.append([name, f"{tokens_per_s:,.0f}", *(f"{median(each):.1f}" for each in times), beside])
    return table(head, lines)
