"""Measures the router's processor time per token, and that of a program that only writes the same bytes."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import uvloop

from text_generation_benchmark.load import Dialect
from text_generation_benchmark.output import table
from text_generation_benchmark.process import ChildServer, ServerCommand, free_port
from text_generation_benchmark.router.reading import WriterTime, events_of, measure_writer, request_bytes

STREAMS = (1, 16, 64, 256)
START_S = 60.0
ROUTER = Path(sys.executable).parent / "text-generation-router"


@dataclass(frozen=True, slots=True)
class RouterTime:
    streams: int
    router: WriterTime
    floor: WriterTime

    def cells(self) -> Sequence[str]:
        router, floor = self.router, self.floor
        return (
            str(self.streams),
            f"{router.tokens / router.wall_s:,.0f}",
            f"{router.user_us:.1f}",
            f"{router.total_us:.1f}",
            f"{floor.user_us:.1f}",
            f"{floor.total_us:.1f}",
            f"{router.total_us / floor.total_us:.2f}" if floor.total_us else "–",  # less than a clock tick
        )


HEAD = (
    "streams", "tokens/s", "router: user µs per token", "user and system", "writing alone: user µs per token",
    "user and system", "router ÷ writing alone",
)  # fmt: skip


def as_markdown(times: Sequence[RouterTime]) -> str:
    """Several streams of a step share its costs: a straight line through two numbers of streams separates them."""
    lines = [time.cells() for time in times]
    least, most = min(times, key=lambda time: time.streams), max(times, key=lambda time: time.streams)
    if most.streams == least.streams:
        return table(HEAD, lines)
    step_us = {t.streams: t.router.user_us * t.streams for t in (most, least)}
    token_us = (step_us[most.streams] - step_us[least.streams]) / (most.streams - least.streams)
    rest_us = step_us[least.streams] - least.streams * token_us
    return f"{table(HEAD, lines)}\n\nUser time: {token_us:.1f} µs per token, and {rest_us:.0f} µs per step."


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Inside this context new processes run on one core, if the machine has several."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def running_router(model: Path, folder: Path, router: Path, step_s: float) -> Iterator[ChildServer]:
    """A router, and a shard that takes `step_s` seconds for a step. The router has the first core for itself."""
    with running_shard(model, folder, step_s) as socket:
        arguments = [str(router), "--master-shard-uds-path", socket, *router_arguments(model)]
        with running_on_first_core(arguments, folder / "router.log") as server:
            yield server


def router_arguments(model: Path) -> list[str]:
    return ["--tokenizer-name", str(model), "--hostname", "127.0.0.1", "--max-concurrent-requests", "512"]


@contextlib.contextmanager
def running_on_first_core(router: Sequence[str], log: Path) -> Iterator[ChildServer]:
    """A router on a free port, by its command line."""
    port = free_port()
    server = ChildServer(ServerCommand("the router", [*router, "--port", str(port)], port, "/health", START_S), log)
    with on_core(0):
        server.start()
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def running_shard(model: Path, folder: Path, step_s: float) -> Iterator[str]:
    """A shard without a model, which takes `step_s` seconds for a step. Gives the path of its socket."""
    uds_path = f"{folder}/shard"
    arguments = [sys.executable, "-m", "text_generation_benchmark.router.shard", str(model), uds_path, str(step_s)]
    shard = ChildServer(ServerCommand("the shard", arguments, 0, "", START_S), folder / "shard.log")
    with on_core(1):
        shard.start()
    try:
        wait_for(Path(f"{uds_path}-0"))
        yield f"{uds_path}-0"
    finally:
        shard.running.kill()
        shard.running.wait()


def wait_for(path: Path) -> None:
    until_s = time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > until_s:
            raise RuntimeError(f"{path} is not there after {START_S:.0f} s")
        time.sleep(0.05)


async def measure_floor(folder: Path, streams: int, pace_s: float, events: list[str], seconds: float) -> WriterTime:
    """What writing `events` to as many connections takes, one to each every `pace_s` seconds, on the router's core."""
    port, file = free_port(), folder / "events.json"
    file.write_bytes(orjson.dumps(events))
    arguments = [sys.executable, "-m", "text_generation_benchmark.router.floor"]
    arguments += [str(port), str(streams), str(pace_s), str(file)]
    child = ChildServer(ServerCommand("the floor program", arguments, port, "", 30), folder / "floor.log")
    with on_core(0):
        child.start()
    try:
        measured, _ = await measure_writer(child.pid, port, b"", streams, seconds)
    finally:
        child.running.kill()
        child.running.wait()
    return measured


def measure(
    model: Path, streams: Sequence[int], seconds: float, dialect: Dialect, step_s: float = 0.0, router: Path = ROUTER
) -> list[RouterTime]:
    """Measures the router on one core. The shard and the client share the other core, and are not counted."""
    times, request = [], request_bytes(dialect)
    with (
        tempfile.TemporaryDirectory(prefix="tgi-bench-") as name,
        running_router(model, Path(name), router, step_s) as server,
    ):
        for count in streams:
            with on_core(1):
                measured, received = uvloop.run(measure_writer(server.pid, server.port, request, count, seconds))
                pace_s = measured.wall_s * count / measured.tokens
                floor = uvloop.run(measure_floor(Path(name), count, pace_s, events_of(received), seconds))
            times.append(RouterTime(count, measured, floor))
    return times
