"""The launcher's side of Ray: keeps the driver process, and sends it the wanted replicas.

The driver's end changes nothing: its last report of the engines counts until the next driver reports.
"""

import asyncio
import logging
import signal
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from text_generation_common.autoscaling import Demand
from text_generation_common.backoff import Backoff
from text_generation_common.json_values import as_json, from_json
from text_generation_common.tasks import cancelled
from text_generation_launcher.errors import RayFailed
from text_generation_launcher.process import Child
from text_generation_launcher.ray.values import (
    EngineOrder,
    FrontOrder,
    RayPhase,
    RayReport,
    RayStatus,
    Wanted,
    digest_of,
)

logger = logging.getLogger("text_generation_launcher")

# Seconds before the driver is started again: the first time, and at most. After a run of MAX_WAIT_S the first wait is
# FIRST_WAIT_S again.
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 30.0
# Seconds without a report after which Ray counts as silent, and after which a driver is killed and replaced.
SILENT_S, HUNG_S = 10.0, 90.0
CHECK_S = 1.0
LINE_LIMIT = 2**22
RAY_HINT = (
    "start Ray on this machine (`ray start --head`, or `ray start --address=HEAD:6379`), or give its --ray ADDRESS"
)


@dataclass(slots=True)
class KnownReplica:
    """A replica on Ray as the launcher knows it. `on_status` is called at each change; `status` is None before the
    first report."""

    on_status: Callable[[RayStatus | None], None]
    is_wanted: bool = True
    status: RayStatus | None = None


class RayClient:
    """Keeps one driver process alive. `run` is to be started as a task. `start` starts the process with a file
    descriptor: its end of the connection to the launcher. `order` is what every replica runs."""

    def __init__(self, start: Callable[[int], Awaitable[Child]], order: EngineOrder) -> None:
        self._start = start
        self._order = order
        self._replicas: dict[str, KnownReplica] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._child: Child | None = None
        self._heard_s = time.monotonic()
        self._has_reported = False
        self._was_silent = False
        self._number = 0  # number of the last `Wanted` message
        # Set if the driver's last report answers the last `Wanted` message and lists neither replicas nor fronts.
        self._is_cleared = asyncio.Event()
        self._front_order: FrontOrder | None = None
        self._front_restart = ""
        self._fronts: dict[str, RayStatus] = {}  # fronts of each other machine, by actor
        # Set if no fronts were ever wanted on other machines, or if the driver's last report answers the last `Wanted`
        # message and lists no fronts.
        self._has_no_fronts = asyncio.Event()
        self._has_no_fronts.set()

    @property
    def silent_s(self) -> float:
        """Age of the driver's last report in seconds."""
        return time.monotonic() - self._heard_s

    def want(self, number: int, on_status: Callable[[RayStatus | None], None]) -> None:
        """From now on replica `number` is wanted. `on_status` is called at each change, with None once it is gone."""
        self._replicas[self._name(number)] = KnownReplica(on_status)
        self._send()

    def drop(self, number: int) -> None:
        """From now on the replica is not wanted: it drains, and then is gone. Until then `on_status` is called."""
        self._replicas[self._name(number)].is_wanted = False
        self._send()

    def forget(self, number: int) -> None:
        """Drops the replica. `on_status` is not called any more."""
        if self._replicas.pop(self._name(number), None) is not None:
            self._send()

    def want_fronts(self, order: FrontOrder) -> None:
        """From now on every machine of the cluster but this one is to have these fronts."""
        self._front_order = order
        self._has_no_fronts.clear()
        self._send()

    def drop_fronts(self) -> None:
        """From now on no fronts are wanted on other machines; the fronts that run there drain."""
        if self._front_order is not None:
            self._front_order = None
            self._send()

    def restart_fronts(self) -> None:
        """Has the fronts of each other machine replaced, one after another on each, as soon as Ray answers."""
        if self._front_order is not None:
            self._front_restart = uuid.uuid4().hex
            self._send()

    async def fronts_gone(self, give_up_s: float) -> None:
        """Returns when no fronts are left on other machines, or when Ray has been silent for `give_up_s` seconds."""
        while not self._has_no_fronts.is_set() and self.silent_s < give_up_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_no_fronts.wait(), CHECK_S)

    @property
    def demands(self) -> list[Demand]:
        """The demand of clients at each front on other machines that has reported it."""
        return [status.demand for status in self._fronts.values() if status.demand is not None]

    async def clear(self) -> None:
        """Drops replicas and fronts, and returns when all of them have left Ray. `run` has to go on meanwhile."""
        self._replicas.clear()
        self._front_order = None
        self._send()
        await self._is_cleared.wait()

    async def run(self) -> NoReturn:
        """Never returns. Raises RayFailed if the first driver cannot reach Ray."""
        backoff = Backoff(FIRST_WAIT_S, MAX_WAIT_S, MAX_WAIT_S)
        watching = asyncio.create_task(self._watch_silence())
        try:
            while True:
                backoff.came_up(time.monotonic())
                child = await self._run_one()
                if not self._has_reported:
                    lines = child.last_lines.splitlines()
                    raise RayFailed(lines[-1] if lines else f"the driver of Ray {child.how_it_ended}", RAY_HINT)
                wait_s = backoff.failed(time.monotonic())
                logger.warning(
                    "The driver of Ray %s; the engines go on. Next driver in %.0fs", child.how_it_ended, wait_s
                )
                await asyncio.sleep(wait_s)
        finally:
            await cancelled(watching)

    async def _run_one(self) -> Child:
        """Starts a driver, and returns its process when it has ended."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT)
        try:
            with theirs:
                self._child = child = await self._start(theirs.fileno())
            self._writer = writer
            self._send()
            with suppress(ConnectionError):  # A driver that is killed may not have read its last message.
                while line := await reader.readline():
                    self._take(from_json(RayReport, line))
            await asyncio.wait([child.exited])
            return child
        finally:
            self._writer = self._child = None
            writer.close()

    def _name(self, number: int) -> str:
        """The replica's name in Ray. It contains a digest of the order, so that replicas of other orders have other
        names."""
        return f"{digest_of(self._order)}-{number}"

    def _send(self) -> None:
        self._number += 1
        self._is_cleared.clear()
        if self._writer is not None:
            wanted = {name: known for name, known in self._replicas.items() if known.is_wanted}
            addresses = {name: known.status.address if known.status else "" for name, known in wanted.items()}
            message = Wanted(self._order, addresses, self._number, self._front_order, self._front_restart)
            self._writer.write(as_json(message) + b"\n")

    def _take(self, report: RayReport) -> None:
        if self._was_silent:
            logger.info("Ray answers again")
        self._heard_s, self._has_reported, self._was_silent = time.monotonic(), True, False
        if report.number == self._number and not report.fronts and self._front_order is None:
            self._has_no_fronts.set()
            if not report.replicas:
                self._is_cleared.set()
        fronts = {front.name: front for front in report.fronts}
        for name, front in fronts.items():
            _log_change(self._fronts.get(name), front)
        for name in self._fronts.keys() - fronts.keys():
            logger.info("%s has left", name)
        self._fronts = fronts
        found = {status.name: status for status in report.replicas}
        for name, known in list(self._replicas.items()):
            status = found.get(name)
            if status is None and not known.is_wanted:
                del self._replicas[name]
                known.on_status(None)
            elif status is not None and status != known.status:
                _log_change(known.status, status)
                known.status = status
                known.on_status(status)

    async def _watch_silence(self) -> NoReturn:
        while True:
            await asyncio.sleep(CHECK_S)
            if self.silent_s >= SILENT_S and self._has_reported and not self._was_silent:
                self._was_silent = True
                logger.warning("Ray has not answered for %.0fs; the engines that serve go on", self.silent_s)
            if self.silent_s >= HUNG_S and self._child is not None:
                logger.error("The driver of Ray hangs: killing it")
                self._heard_s = time.monotonic()
                self._child.send(signal.SIGKILL)


def _log_change(before: RayStatus | None, now: RayStatus) -> None:
    if before is not None and before.phase is now.phase and before.why == now.why and before.address == now.address:
        return
    if now.phase is RayPhase.PENDING:
        logger.warning("%s is pending: no machine of the Ray cluster has room", now.name)
    elif now.phase is RayPhase.SERVING:
        logger.info("%s serves on %s", now.name, now.address)
    elif now.why and before is not None and before.phase is RayPhase.SERVING:
        logger.warning("%s is lost: %s. The next start loads the model again", now.name, now.why)
    elif now.why:
        logger.warning("%s is %s: %s", now.name, now.phase, now.why)
