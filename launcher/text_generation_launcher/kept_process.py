"""Keeps a process that serves requests alive, and holds the launcher's end of the line to the process: a router, an
engine without HTTP, or a front of such an engine. The launcher keeps the port's socket open meanwhile.

A process that hangs is killed, and then replaced like any process that has died.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from text_generation_common.link import Link, LinkEvent, LinkMessage, ReplicaReport
from text_generation_common.tasks import cancelled
from text_generation_launcher.errors import WebserverCannotStart, WebserverFailed
from text_generation_launcher.process import SEE_LOG, Child, log_last_lines
from text_generation_launcher.restarts import Restarts

logger = logging.getLogger("text_generation_launcher")

# Decides whether the router's event loop works or hangs, from its answers to pings and from the kernel's counts.
#
# A router that is stopped or stuck does not answer, and a router that waits for a processor does not answer either. The
# kernel's counts show the difference: only time in which the router could have answered is counted. Time in which the
# whole machine is suspended is not counted, because the monotonic clock stands still. The rules do no input or output.

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


# Seconds to read the last messages of a dead process: a process that it has started may hold the line open.
LAST_MESSAGES_S = 1.0
# Exit statuses with which a process ends after it was asked to end.
ASKED_ENDS = (0, -signal.SIGTERM, -signal.SIGKILL)


class KeptProcess:
    """Keeps one process alive. `run` is to be started as a task. `on_message` is called with its messages about shards,
    `on_end` when it has ended without being asked to.
    """

    def __init__(
        self,
        start: Callable[[int], Awaitable[Child]],
        title: str,
        on_message: Callable[[LinkMessage], None],
        on_end: Callable[[], None],
        restarts: Restarts,
        waits_for_shards: bool = True,
        on_listening: Callable[[str], None] = lambda address: None,
        on_draining: Callable[[], None] = lambda: None,
        adapters: Callable[[], LinkMessage | None] = lambda: None,
        stands_by: Callable[[], bool] = lambda: False,
    ) -> None:
        """`start` starts the process, with its end of the line. `title`: its name at the start of log lines.
        `waits_for_shards`: whether its first start is told when the first shards are ready. `on_listening` is called
        whenever a process serves requests, with an engine's address. `on_draining` is called when the process ends
        because others than the launcher have asked for it; it is not started again. `adapters`: makes the message
        with the LoRA adapters that are served, if others were served at the start. `stands_by`: whether the next start
        costs nothing."""
        self._start = start
        self.title = title
        self._on_message = on_message
        self._on_end = on_end
        self._restarts = restarts
        self._waits_for_shards = waits_for_shards
        self._on_listening = on_listening
        self._on_draining = on_draining
        self._adapters = adapters
        self._stands_by = stands_by
        self._stopping = asyncio.Event()
        self._server_ends = False
        self._child: Child | None = None
        self._link: Link | None = None
        self._ready: LinkMessage | None = None  # the `ready` message of the living shards, kept for later processes
        self._engines: LinkMessage | None = None  # the newest `engines` message, kept for later processes
        self._has_had_shards = False
        self._has_hung = False  # the present process was killed because it hung
        self.has_listened = False
        self.listening = asyncio.Event()  # set while the present process serves requests

    @property
    def name(self) -> str:
        """The name within log lines."""
        return self.title.lower()

    def notify(self, message: LinkMessage) -> None:
        """Sends `ready` or `lost` to the process. `ready` is also sent to later processes, until `lost`."""
        if not self._has_had_shards and message.event is LinkEvent.READY:
            # TGI logs this line when its shards are ready, and only then starts its router. Our router runs already.
            logger.info("Starting %s", self.title)
            self._has_had_shards = True
        self._ready = message if message.event is LinkEvent.READY else None
        self.send(message)

    def report_engines(self, deployment: ReplicaReport) -> None:
        """Sends the replicas to the process, a front, and to later ones."""
        self._engines = LinkMessage(LinkEvent.ENGINES, deployment=deployment)
        self.send(self._engines)

    def send(self, message: LinkMessage) -> None:
        """Sends a message to the process, if there is one."""
        if self._link is not None:
            self._link.send(message)

    def stop(self) -> None:
        """Asks the process to end with the whole server, which it does when its requests are done; then `run`
        returns."""
        self._server_ends = True
        if not self._stopping.is_set():
            self.leave()
        else:
            self.send(LinkMessage(LinkEvent.ENDING))

    def leave(self) -> None:
        """As `stop`, for a process whose place another one takes."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends a process that was asked to end, and has not."""
        self._signal(signal.SIGKILL)

    async def run(self) -> None:
        """Keeps a process running until `stop`. Raises a CommandError when another start would not help."""
        if not self._waits_for_shards:
            logger.info("Starting %s", self.title)
        while True:
            child = None
            try:
                child = await self._run_one()
            except WebserverCannotStart as error:
                if not self.has_listened:
                    raise
                logger.error("%s cannot start: %s", self.title, error.reason)
            if not self._stopping.is_set():
                self._on_end()
                await self._wait_for_next_start(child)
            if self._stopping.is_set():
                return
            logger.info("Starting %s", self.title)

    async def _run_one(self) -> Child:
        """Runs one process to its end. WebserverFailed if it was asked to end and failed to."""
        self._has_hung = False
        ours, theirs = socket.socketpair()
        link = await Link.open(ours)
        try:
            with theirs:
                self._child = child = await self._start(theirs.fileno())
            self._link = link  # Not before: what came during the start is sent now, and would be sent twice.
            if self._stopping.is_set():
                self._signal(signal.SIGTERM)  # `stop` was called before the process existed.
            for message in filter(None, (self._adapters(), self._ready, self._engines)):
                link.send(message)
            await self._follow(link, child)
        finally:
            link.close()
            self._link = self._child = None
            self.listening.clear()
        if self._stopping.is_set() and (self._has_hung or child.exited.result() not in ASKED_ENDS):
            if not child.error:
                self._log_end(child)
            raise self._failed(child)
        return child

    async def _follow(self, link: Link, child: Child) -> None:
        """Reads the messages of the process and watches its pulse. Returns when it has ended."""
        pulse = Pulse(lambda: link.send(LinkMessage(LinkEvent.PING)))
        reading = asyncio.create_task(self._read_messages(link, child, pulse))
        watching = asyncio.create_task(self._kill_when_it_hangs(pulse, child))
        # A process that closes the line is about to end, and need not answer pings.
        reading.add_done_callback(lambda _: watching.cancel())
        try:
            await asyncio.wait([child.exited])
            await asyncio.wait([reading], timeout=LAST_MESSAGES_S)
        finally:
            await cancelled(reading, watching)

    async def _read_messages(self, link: Link, child: Child, pulse: Pulse) -> None:
        try:
            while (message := await link.receive()) is not None:
                if message.event is LinkEvent.LISTENING:
                    self.has_listened = True
                    self.listening.set()
                    self._restarts.came_up()
                    pulse.begin()
                    self._on_listening(message.address)
                elif message.event is LinkEvent.PONG:
                    pulse.answered()
                elif message.event is LinkEvent.DRAINING:
                    self._drains(link)
                else:
                    if message.event is LinkEvent.CONFIRMED:
                        self._restarts.succeeded()
                    self._on_message(message)
        except ValueError as error:
            logger.error("The %s sent a line that is not a message (%s): killing it", self.name, error)
            child.send(signal.SIGKILL)

    def _drains(self, link: Link) -> None:
        link.send(LinkMessage(LinkEvent.ENDING if self._server_ends else LinkEvent.LEAVE))
        if not self._stopping.is_set():
            self._stopping.set()
            self._on_draining()

    async def _kill_when_it_hangs(self, pulse: Pulse, child: Child) -> None:
        reason = await until_it_hangs(pulse, child.pid)
        logger.error("The %s hangs (%s): killing it", self.name, reason)
        self._has_hung = True
        child.send(signal.SIGKILL)

    async def _wait_for_next_start(self, child: Child | None) -> None:
        """Waits until the next start is due, or until `stop`. Raises when there should be no next start. `child` is the
        process that has ended, None if it could not be started."""
        wait_s = self._restarts.failed(self._stands_by())
        is_last = wait_s is None or not self.has_listened
        if child is not None and not (is_last and child.error):
            self._log_end(child)
        if wait_s is None or not self.has_listened:
            raise self._failed(child)
        logger.warning("Starting the %s again in %.1fs", self.name, wait_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), wait_s)

    def _signal(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._child.send(number)

    def _log_end(self, child: Child) -> None:
        log_last_lines(f"{self.title} {child.how_it_ended}", child)
        logger.error("%s Crashed", self.title)

    def _failed(self, child: Child | None) -> WebserverFailed:
        if child is None:
            return WebserverFailed(f"the {self.name} cannot be started", SEE_LOG)
        if child.error:
            return WebserverFailed(child.error)
        return WebserverFailed(f"the {self.name} {child.how_it_ended}", SEE_LOG)
