"""Does the router's event loop turn? The rules are pure; the signs are answers to pings, and what the kernel says.

A router that is stopped or stuck answers nothing, and neither does one that waits for a processor. The kernel knows the
difference: only the time in which the router could have answered counts against it. The monotonic clock does not count
the time in which the whole machine is suspended.
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.25
# The router may be stopped (SIGSTOP) for so long, as seen by the launcher, which looks every LOOK_S.
STOPPED_S = 2.25
# The event loop may be silent for so long, not counting the time in which its thread waits for a processor.
SILENT_S = 8.0
# After a longer gap between two looks the launcher itself was stopped or starved, and the router's record is cleared.
LONGEST_GAP_S = 1.0

STOPPED, RUNNABLE = "T", "R"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the kernel knows of the thread of an event loop."""

    state: str  # of proc(5): R runs or waits for a processor, S sleeps, T is stopped
    ran_s: float  # since the thread began, on a processor
    waited_s: float  # since the thread began, runnable and without a processor; 0 where the kernel does not count it


class Pulse:
    """One router's. `ask` sends a ping. Nothing is expected of a router that has not begun to serve."""

    def __init__(self, ask: Callable[[], None], now_s: float = 0.0) -> None:
        self._ask = ask
        self._seen_s = now_s
        self._has_begun = False
        self._is_asked = False
        self._silent_s = 0.0
        self._stopped_s = 0.0
        self._last: Vitals | None = None

    def begin(self) -> None:
        """The router serves, and answers pings from now on."""
        self._has_begun = True

    def answered(self) -> None:
        self._is_asked = False
        self._silent_s = 0.0

    def look(self, now_s: float, vitals: Vitals | None) -> str | None:
        """The reason when the router hangs, else None. `vitals` is None where the kernel does not tell."""
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
            self._ask()  # one ping at a time: pings that a stopped router does not read must not fill the line
            self._is_asked = True
        if self._stopped_s >= STOPPED_S:
            return f"its process has been stopped for {self._stopped_s:.1f} s"
        if self._silent_s >= SILENT_S:
            return f"its event loop has not answered for {self._silent_s:.1f} s"
        return None


def idle_s(gap_s: float, before: Vitals | None, now: Vitals | None) -> float:
    """Of `gap_s`, the seconds in which the thread could have answered: it had a processor, or asked for none."""
    if before is None or now is None:
        return gap_s
    # The kernel counts a wait when it is over. One that is not over shows as a runnable thread that does not run.
    counted_s = now.ran_s - before.ran_s if now.state == RUNNABLE else gap_s - (now.waited_s - before.waited_s)
    return min(max(counted_s, 0.0), gap_s)


async def until_it_hangs(pulse: Pulse, pid: int) -> str:
    """Returns the reason. Runs until then, or until it is cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        reason = pulse.look(time.monotonic(), read_vitals(pid))
        if reason is not None:
            return reason


def read_vitals(pid: int, proc: Path = Path("/proc")) -> Vitals | None:
    """Of the main thread, which runs the event loop. None without /proc, and of a process that has ended."""
    thread = proc / str(pid) / "task" / str(pid)
    try:
        fields = (thread / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    try:
        ran_ns, waited_ns = map(int, (thread / "schedstat").read_text().split()[:2])
    except (OSError, ValueError):  # a kernel without scheduler statistics
        return Vitals(fields[0], (int(fields[11]) + int(fields[12])) * TICK_S, 0.0)
    return Vitals(fields[0], ran_ns / 1e9, waited_ns / 1e9)
