"""How much slower this machine is now than an idle one of the kind that the tests' limits in seconds are made for."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass

# What a program's start and end do: modules are loaded, and Python computes.
WORK = "import asyncio, decimal, email.message, http.client, logging.config; sum(map(hash, range(1_000_000)))"
# Two processes do it at once, as the children of a server start and end beside each other.
PROCESSES = 2
# Seconds that they take on two idle cores, and seconds of processor time of one of them.
IDLE_S, IDLE_CPU_S = 0.2, 0.2


@dataclass(frozen=True, slots=True)
class Slowness:
    """Factors of limits in seconds, 1 on an idle machine, and on a faster one."""

    clock: float
    cpu: float

    def or_more(self, other: "Slowness") -> "Slowness":
        return Slowness(max(self.clock, other.clock), max(self.cpu, other.cpu))


def slowness_now() -> Slowness:
    began_s, before = time.monotonic(), os.times()
    children = [subprocess.Popen([sys.executable, "-I", "-c", WORK]) for _ in range(PROCESSES)]
    assert [child.wait() for child in children] == [0] * PROCESSES
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return Slowness(max(1.0, (time.monotonic() - began_s) / IDLE_S), max(1.0, cpu_s / PROCESSES / IDLE_CPU_S))
