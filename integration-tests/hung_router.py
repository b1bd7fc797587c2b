"""Routers that hang, and routers that are only slow: measures which of them the launcher replaces, and after how many
seconds.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import processes
from departures import connections, held
from kills import log_entries
from scale import Scale
from server_process import ServerProcess, wait_until
from streams import Comparison, StreamAnswer, StreamClients, compare, run_streams

REPLACED_LIMIT_S = 5.0
# A stuck event loop may recover by itself, so the launcher waits longer for it than for a stopped process. Seconds.
STUCK_LIMIT_S = 12.0
LOAD_PER_CORE = 4

Harm = Callable[[ServerProcess], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Replaced:
    what: str
    limit_s: float
    replaced_s: float  # seconds until a new router was started
    back_s: float  # seconds until the server was ready again
    shards_kept: bool

    def failures(self) -> list[str]:
        late = self.replaced_s > self.limit_s
        found = [f"{self.what}: replaced after {self.replaced_s:.1f} s, the limit is {self.limit_s} s"] if late else []
        return found if self.shards_kept else [*found, f"{self.what}: the shards were started again"]


@dataclass(frozen=True, slots=True)
class LeftAlone:
    what: str
    replaced: bool
    comparison: Comparison

    def failures(self) -> list[str]:
        found = [f"{self.what}: the router was replaced"] if self.replaced else []
        return found if self.comparison.is_equal else [*found, f"{self.what}: {self.comparison}"]


def replace_stopped(scale: Scale) -> Replaced:
    """Sends SIGSTOP to a router that serves eight streams."""
    with scale.server(1) as server:
        old, shards = processes.router(server.pid), set(processes.shards(server.pid).values())
        with connections(server, 8, {"max_new_tokens": 400, "ignore_eos_token": True}):
            wait_until(lambda: held(server) > 0, 30, "the streams begin")
            old.send_signal(signal.SIGSTOP)
            stopped_s = time.monotonic()
            wait_until(lambda: _has_other_router(server, old.pid), 60, "another router is started")
            replaced_s = time.monotonic() - stopped_s
        wait_until(server.is_ready, 60, "the server is ready again")
        back_s = time.monotonic() - stopped_s
        kept = shards == set(processes.shards(server.pid).values())
    return Replaced("SIGSTOP", REPLACED_LIMIT_S, replaced_s, back_s, kept)


def replace_stuck(scale: Scale) -> Replaced:
    """Blocks the router's event loop by an injected fault, while the router serves eight streams."""
    faults = {"FAILPOINTS": "router.rpc:delay=600@40"}
    with scale.server(1, "--testing", environ=faults) as server:
        old, shards = processes.router(server.pid), set(processes.shards(server.pid).values())
        with connections(server, 8, {"max_new_tokens": 200, "ignore_eos_token": True}):
            wait_until(lambda: _has_other_router(server, old.pid), 60, "another router is started")
            replaced_at_s = time.time()
        wait_until(server.is_ready, 60, "the server is ready again")
        stuck_at_s = _injected_at_s(server.log())
        kept = shards == set(processes.shards(server.pid).values())
        return Replaced("event loop stuck", STUCK_LIMIT_S, replaced_at_s - stuck_at_s, time.time() - stuck_at_s, kept)


def leave_alone(scale: Scale, what: str, harm: Harm, expected: Sequence[StreamAnswer]) -> LeftAlone:
    """As `leave_server_alone`, with a server of its own."""
    with scale.server(1) as server:
        return leave_server_alone(server, scale, what, harm, expected)


def leave_server_alone(
    server: ServerProcess, scale: Scale, what: str, harm: Harm, expected: Sequence[StreamAnswer]
) -> LeftAlone:
    """Does `harm` while all early streams run, which must not make the launcher replace the router. Compares every
    stream with the run without faults.
    """
    router = processes.router(server.pid)

    async def do_harm(clients: StreamClients) -> None:
        await clients.wait_for_tokens(scale.num_streams * scale.new_tokens // 4)
        await harm(server)

    answers, _ = run_streams(server.url, scale.asks(), scale.num_streams, do_harm)
    return LeftAlone(what, processes.router(server.pid) != router, compare(expected, answers))


async def stop_router_for(seconds: float, server: ServerProcess) -> None:
    router = processes.router(server.pid)
    router.send_signal(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    router.send_signal(signal.SIGCONT)


async def stop_launcher_for(seconds: float, server: ServerProcess) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    await asyncio.sleep(seconds)
    os.kill(server.pid, signal.SIGCONT)
    await asyncio.sleep(5.0)  # time in which the launcher could replace the router by mistake


async def starve_for(seconds: float, server: ServerProcess) -> None:
    with busy_processes(LOAD_PER_CORE * (os.cpu_count() or 1)):
        await asyncio.sleep(seconds)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def everything(
    expected: Sequence[StreamAnswer], scale: Scale
) -> Iterator[tuple[str, Callable[[], Replaced | LeftAlone]]]:
    """Runs all measurements. `expected`: the streams of one shard without faults."""
    yield "router stopped (SIGSTOP)", partial(replace_stopped, scale)
    yield "router's event loop stuck", partial(replace_stuck, scale)
    for what, harm in (
        ("router stopped for 2 s", partial(stop_router_for, 2.0)),
        ("launcher stopped for 10 s", partial(stop_launcher_for, 10.0)),
        (f"{LOAD_PER_CORE} busy processes a core for 60 s", partial(starve_for, 60.0)),
    ):
        yield what, partial(leave_alone, scale, what, harm, expected)


def _has_other_router(server: ServerProcess, old: int) -> bool:
    try:
        return processes.router(server.pid).pid != old
    except LookupError:
        return False


def _injected_at_s(log: str) -> float:
    for entry in log_entries(log):
        if entry["message"].startswith("fault injected: router.rpc delay"):
            return datetime.fromisoformat(entry["timestamp"]).timestamp()
    raise LookupError("no fault was injected")
