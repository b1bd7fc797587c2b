"""Decides whether the router's event loop works or hangs, from its answers to pings and from the kernel's counts.

A router that is stopped or stuck does not answer, and a router that waits for a processor does not answer either. The
kernel's counts show the difference: only time in which the router could have answered is counted. Time in which the
whole machine is suspended is not counted, because the monotonic clock stands still. The rules do no input or output.
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Seconds between two checks of the router.
CHECK_S = 0.25
# Seconds for which the router may be stopped (by SIGSTOP), measured by the launcher's checks.
STOPPED_S = 2.25
# Seconds for which the event loop may not answer, without the time in which its thread waits for a processor.
SILENT_S = 8.0
# Seconds. When two checks are farther apart, the launcher itself was stopped or got no processor, and all time counted
# against the router is cleared.
LONGEST_GAP_S = 1.0

STOPPED, RUNNABLE = "T", "R"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Vitals:
    """The kernel's counts for the thread that runs an event loop. Times are in seconds from the start of the thread."""

    state: str  # as in proc(5): R runs or waits for a processor, S sleeps, T is stopped
    ran_s: float  # seconds on a processor
    waited_s: float  # seconds of waiting for a processor; 0 if the kernel does not count this time


class Pulse:
    """Decides whether one router hangs. `ping` sends it a ping. A router that does not serve yet never counts as
    hung.
    """

    def __init__(self, ping: Callable[[], None], now_s: float = 0.0) -> None:
        self._ping = ping
        self._seen_s = now_s
        self._has_begun = False
        self._is_asked = False
        self._silent_s = 0.0
        self._stopped_s = 0.0
        self._last: Vitals | None = None

    def begin(self) -> None:
        """To be called when the router serves requests; from now on the router must answer pings."""
        self._has_begun = True

    def answered(self) -> None:
        self._is_asked = False
        self._silent_s = 0.0

    def judge(self, now_s: float, vitals: Vitals | None) -> str | None:
        """The reason if the router hangs, or None if it works. `vitals` is None on a system without /proc."""
        gap_s, last = now_s - self._seen_s, self._last
        self._seen_s, self._last = now_s, vitals
        if gap_s > LONGEST_GAP_S or not self._has_begun:
            self._silent_s = self._stopped_s = 0.0
            return None
        was_stopped = last is not None and vitals is not None and last.state == vitals.state == STOPPED
        self._stopped_s = self._stopped_s + gap_s if was_stopped else 0.0
        if self._is_asked:
            self._silent_s += idle_s(gap_s, last, vitals)
        else:
            self._ping()  # One ping at a time: pings that a stopped router does not read must not fill the socket.
            self._is_asked = True
        if self._stopped_s >= STOPPED_S:
            return f"its process has been stopped for {self._stopped_s:.1f} s"
        if self._silent_s >= SILENT_S:
            return f"its event loop has not answered for {self._silent_s:.1f} s"
        return None


def idle_s(gap_s: float, before: Vitals | None, now: Vitals | None) -> float:
    """Seconds of `gap_s` in which the thread could have answered: it was on a processor, or did not wait for one."""
    if before is None or now is None:
        return gap_s
    # The kernel adds a wait to its count only when the wait is over. During a wait the thread is runnable and does not
    # run.
    counted_s = now.ran_s - before.ran_s if now.state == RUNNABLE else gap_s - (now.waited_s - before.waited_s)
    return min(max(counted_s, 0.0), gap_s)


async def until_it_hangs(pulse: Pulse, pid: int) -> str:
    """Checks the router every CHECK_S. Returns the reason when the router hangs."""
    while True:
        await asyncio.sleep(CHECK_S)
        reason = pulse.judge(time.monotonic(), read_vitals(pid))
        if reason is not None:
            return reason


def read_vitals(pid: int, proc: Path = Path("/proc")) -> Vitals | None:
    """Counts of the main thread, which runs the event loop. None without /proc and for a process that has ended."""
    thread = proc / str(pid) / "task" / str(pid)
    try:
        fields = (thread / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    try:
        ran_ns, waited_ns = map(int, (thread / "schedstat").read_text().split()[:2])
    except (OSError, ValueError):  # The kernel has no scheduler statistics.
        return Vitals(fields[0], (int(fields[11]) + int(fields[12])) * TICK_S, 0.0)
    return Vitals(fields[0], ran_ns / 1e9, waited_ns / 1e9)
