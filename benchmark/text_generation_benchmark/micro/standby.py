"""What processes that wait cost: `--standby on` beside `off`, at the start of a server and at rest.

Servers start in turns, each with a warm page cache. Processor time is that of the launcher and of all its descendants,
those that have ended included. Memory is the proportional set size, which divides a page by the processes that map it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.live.reading import TICK_S
from text_generation_benchmark.ours import LAUNCHER
from text_generation_benchmark.output import columns, say
from text_generation_benchmark.process import ChildServer, ServerCommand, free_port
from text_generation_benchmark.shapes import SHAPES
from text_generation_common.model_files import demo_directory

WAYS = ("on", "off")
MAX_TOKENS = "32768"  # token slots, which all get memory at rest
REST = "at rest"
POLL_S = 0.02
# Seconds from the first answer until nothing of the start is left to do: at least, and while the last of them took more
# than a part of a processor, but no longer than the limit.
SETTLE_S, SETTLED, SETTLE_LIMIT_S = 5.0, 0.02, 60.0
NANOSECOND, MIB = 1e-9, 2**20


@dataclass(frozen=True, slots=True)
class StandbyCost:
    ready_s: float
    ready_processor_s: float
    settled_processor_s: float  # until nothing of the start is left to do
    rest_bytes: int
    rest_own_bytes: int  # the part that is not pages of files
    rest_ms: float  # processor time at rest, in milliseconds each second


FIGURES: Mapping[str, Callable[[StandbyCost], float]] = {
    "ready after, s": lambda cost: cost.ready_s,
    "processor seconds until then": lambda cost: cost.ready_processor_s,
    "processor seconds until at rest": lambda cost: cost.settled_processor_s,
    f"{REST}: memory of all processes, MiB": lambda cost: cost.rest_bytes / MIB,
    f"{REST}: memory that is not pages of files, MiB": lambda cost: cost.rest_own_bytes / MIB,
    f"{REST}: processor time, ms for each s": lambda cost: cost.rest_ms,
}


def standby(model: str = "demo", turns: int = 7, rest: float = 60.0, shards: int = 1) -> str:
    """`rest`: seconds at rest of each server in the last turn; in others a second."""
    if model not in ("demo", *SHAPES):
        raise ValueError(f"{model} is not a model that is measured: choose demo, {', '.join(SHAPES)}")
    with TemporaryDirectory(prefix="tgi-bench-") as name:
        folder = demo_directory()
        if model in SHAPES:
            write_checkpoint(folder := Path(name, model), SHAPES[model])
        costs: dict[str, list[StandbyCost]] = {way: [] for way in WAYS}
        measure(folder, Path(name), WAYS[0], 1, shards)  # fills the page cache
        for turn in range(turns):
            for way in WAYS[:: 1 if turn % 2 else -1]:
                costs[way].append(cost := measure(folder, Path(name), way, rest if turn == turns - 1 else 1, shards))
                say(f"{way}: ready after {cost.ready_s:.2f} s, {cost.ready_processor_s:.2f} s of processors")
    return columns(rows(costs))


def rows(costs: Mapping[str, Sequence[StandbyCost]]) -> list[dict[str, str]]:
    """Medians of the turns, and the median, the least and the largest of what is more with `--standby on` in a turn.
    What is measured at rest is that of the last turn."""
    found = []
    for name, figure in FIGURES.items():
        on, off = ([figure(cost) for cost in costs[way]][-1 if name.startswith(REST) else 0 :] for way in WAYS)
        more = [one - other for one, other in zip(on, off, strict=True)]
        spread = f" ({min(more):.2f} to {max(more):.2f})" if len(more) > 1 else ""
        cells = (f"{median(on):.2f}", f"{median(off):.2f}", f"{median(more):.2f}{spread}")
        found.append(dict(zip(("", *WAYS, "more"), (name, *cells), strict=True)))
    return found


def measure(model: Path, folder: Path, way: str, rest_s: float, shards: int) -> StandbyCost:
    port = free_port()
    words = [str(LAUNCHER), "--model-id", str(model), "--hostname", "127.0.0.1", "--port", str(port)]
    words += ["--shard-uds-path", f"{folder}/shard", "--standby", way, "--num-shard", str(shards)]
    words += ["--max-batch-total-tokens", MAX_TOKENS]
    server = ChildServer(ServerCommand("the server", words, port, "/health", SETTLE_LIMIT_S), folder / "log")
    started_s = time.monotonic()
    with server.started():
        while not server.is_ready():
            if server.running.poll() is not None:
                raise RuntimeError(f"the server ended: {server.log()[-2000:]}")
            time.sleep(POLL_S)
        ready_s, ready_processor_s = time.monotonic() - started_s, processor_s(server.pid)
        time.sleep(SETTLE_S)
        limit_s = time.monotonic() + SETTLE_LIMIT_S
        while load(server.pid, 1.0) > SETTLED and time.monotonic() < limit_s:
            pass
        settled_s, rest_ms, (whole, own) = processor_s(server.pid), load(server.pid, rest_s) * 1000, memory(server.pid)
        server.stop()
    return StandbyCost(
        ready_s=ready_s,
        ready_processor_s=ready_processor_s,
        settled_processor_s=settled_s,
        rest_bytes=whole,
        rest_own_bytes=own,
        rest_ms=rest_ms,
    )


def load(launcher: int, seconds: float) -> float:
    """Processors that a server takes in this time."""
    started_s, ran_s = time.monotonic(), run_s(launcher)
    time.sleep(seconds)
    return (run_s(launcher) - ran_s) / (time.monotonic() - started_s)


def family(launcher: int) -> list[int]:
    """A process and all its descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process ended meanwhile
            continue
    found = [launcher]
    for parent in found:  # grows meanwhile
        found += [pid for pid, its in parents.items() if its == parent]
    return found


def processor_s(launcher: int) -> float:
    """Seconds of processor time of a server until now, with its processes that have ended."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15] for pid in family(launcher)]
    return sum(int(ticks) for each in fields for ticks in each) * TICK_S


def run_s(launcher: int) -> float:
    """Seconds for which the threads that a server has now have run: finer than ticks."""
    tasks = [task for pid in family(launcher) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(task.read_text().split()[0]) for task in tasks) * NANOSECOND


def memory(launcher: int) -> tuple[int, int]:
    """Bytes of a server's memory, and of what is not pages of files."""
    sizes = {"Pss:": 0, "Pss_Anon:": 0, "Pss_Shmem:": 0}
    for pid in family(launcher):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, *value = line.split()
            if name in sizes:
                sizes[name] += int(value[0]) << 10
    return sizes["Pss:"], sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]
