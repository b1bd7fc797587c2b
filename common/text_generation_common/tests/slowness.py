"""Limits of tests in seconds, which a machine that is slower than an idle one at the moment may exceed by as much."""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

# What a program's start and end do: modules are loaded, and Python computes.
WORK = "import asyncio, decimal, email.message, http.client, logging.config; sum(map(hash, range(3_000_000)))"
# Two processes do it at once, as the children of a server start and end beside each other.
PROCESSES = 2
# Seconds that both take on two idle cores, and seconds of processor time of each.
IDLE_S, IDLE_CPU_S = 0.17, 0.14
MAX_TRIES = 3


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of the clock, and seconds of processor time of child processes."""

    clock: float
    cpu: float

    @classmethod
    def of(cls, run: Callable[[], object]) -> "Seconds":
        before_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        run()
        after_s, after = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(after_s - before_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


IDLE = Seconds(1.0, 1.0)  # the slowness of an idle machine


def _work() -> None:
    children = [subprocess.Popen([sys.executable, "-I", "-c", WORK]) for _ in range(PROCESSES)]
    assert [child.wait() for child in children] == [0] * PROCESSES


def slowness() -> Seconds:
    """What the seconds of an idle machine are multiplied by to be those of now; at least 1."""
    taken = Seconds.of(_work)
    return Seconds(max(1.0, taken.clock / IDLE_S), max(1.0, taken.cpu / PROCESSES / IDLE_CPU_S))


def is_within(taken_s: float, limit_s: float, before: Seconds = IDLE) -> bool:
    """Whether seconds of the clock, which a test cannot take again, are within a limit of an idle machine. `before`:
    the slowness when they began, because other work that made them longer may have ended since."""
    return taken_s <= limit_s or taken_s <= limit_s * max(before.clock, slowness().clock)


def assert_within(take: Callable[[], Seconds], clock: float = float("inf"), cpu: float = float("inf")) -> None:
    """Fails if each of MAX_TRIES calls of `take` returns more than `clock` seconds, or more than `cpu` seconds of
    processor time, of an idle machine. Other work may begin or end between a call and the measurement of the
    slowness."""
    tries = []
    for _ in range(MAX_TRIES):
        taken = take()
        if taken.clock <= clock and taken.cpu <= cpu:
            return
        slow = slowness()
        if taken.clock <= clock * slow.clock and taken.cpu <= cpu * slow.cpu:
            return
        tries.append((taken, slow))
    raise AssertionError(f"more than {clock} s, or {cpu} s of processor time; taken, and slowness: {tries}")
