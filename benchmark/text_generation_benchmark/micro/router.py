"""The router's processor time per token, and that of a uvloop program that only writes the same bytes.

Run as `python -m text_generation_benchmark.micro.router PORT STREAMS PACE_S FILE`, it is that program: it writes an
event to every connection, again and again. An item of FILE, a JSON list of strings, is one event as it goes to the
socket. Nothing is written before STREAMS connections are there; then there is one step every PACE_S seconds.
"""

import asyncio
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import uvloop

from text_generation_benchmark.live.processes import OTHER_CORE, ROUTER_CORE, LiveProcesses
from text_generation_benchmark.live.reading import WriterTime, events_of, measure_writers, request_bytes
from text_generation_benchmark.load import dialect_of
from text_generation_benchmark.output import table
from text_generation_benchmark.process import ChildServer, ServerCommand, free_port, on_core
from text_generation_common.model_files import demo_directory

STREAMS = (1, 16, 64, 256)
PERMITS = ("--max-concurrent-requests", "512")
# Bytes in a connection's buffer beyond which a step leaves it out: its client is slower than the steps.
MAX_UNREAD = 2**16


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


def router_table(times: Sequence[RouterTime]) -> str:
    """Several streams of a step share its costs: a straight line through two numbers of streams separates them."""
    lines = [time.cells() for time in times]
    least, most = min(times, key=lambda time: time.streams), max(times, key=lambda time: time.streams)
    if most.streams == least.streams:
        return table(HEAD, lines)
    step_us = {t.streams: t.router.user_us * t.streams for t in (most, least)}
    token_us = (step_us[most.streams] - step_us[least.streams]) / (most.streams - least.streams)
    rest_us = step_us[least.streams] - least.streams * token_us
    return f"{table(HEAD, lines)}\n\nUser time: {token_us:.1f} µs per token, and {rest_us:.0f} µs per step."


def router(
    streams: tuple[int, ...] = STREAMS, seconds: float = 5.0, step_ms: float = 0.0, route: str = "generate"
) -> str:
    """`step_ms`: milliseconds that the shard takes for a step. `route`: generate or chat."""
    return router_table(measure(streams, seconds, step_ms / 1000, route))


def measure(streams: Sequence[int], seconds: float, step_s: float, route: str) -> list[RouterTime]:
    """Measures the router on one core. The shard and the client share the other core, and are not counted."""
    times, request = [], request_bytes(dialect_of(route))
    with LiveProcesses(demo_directory(), are_apart=True) as processes, on_core(OTHER_CORE):
        server = processes.router("--master-shard-uds-path", processes.shard(str(step_s)), *PERMITS)
        for count in streams:
            measuring = measure_writers([server.pid], [server.port], request, count, seconds)
            [measured], received = uvloop.run(measuring)
            pace_s = measured.wall_s * count / measured.tokens
            floor = uvloop.run(measure_floor(processes.folder, count, pace_s, events_of(received), seconds))
            times.append(RouterTime(count, measured, floor))
    return times


async def measure_floor(folder: Path, streams: int, pace_s: float, events: list[str], seconds: float) -> WriterTime:
    """What writing `events` to as many connections takes, one to each every `pace_s` seconds, on the router's core."""
    port, file = free_port(), folder / "events.json"
    file.write_bytes(orjson.dumps(events))
    arguments = [sys.executable, "-m", __spec__.name, str(port), str(streams), str(pace_s), str(file)]
    child = ChildServer(ServerCommand("the floor program", arguments, port, "", 30), folder / "floor.log")
    with child.started(ROUTER_CORE):
        [measured], _ = await measure_writers([child.pid], [port], b"", streams, seconds)
    return measured


async def write_steps(port: int, num_streams: int, pace_s: float, events: list[bytes]) -> None:
    transports: list[asyncio.Transport] = []
    complete = asyncio.Event()

    class StreamWriter(asyncio.Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            transports.append(transport)
            if len(transports) == num_streams:
                complete.set()

    loop = asyncio.get_running_loop()
    await loop.create_server(StreamWriter, "127.0.0.1", port)
    await complete.wait()
    next_event = itertools.cycle(events)
    due_s = loop.time()
    while True:
        for transport in transports:
            if transport.get_write_buffer_size() < MAX_UNREAD:
                transport.write(next(next_event))
        due_s = max(due_s + pace_s, loop.time())
        await asyncio.sleep(due_s - loop.time())


if __name__ == "__main__":
    port, num_streams, pace_s, file = sys.argv[1:]
    events = [event.encode() for event in orjson.loads(Path(file).read_bytes())]
    uvloop.run(write_steps(int(port), int(num_streams), float(pace_s), events))
