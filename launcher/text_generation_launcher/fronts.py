"""The fronts of a server: keeps a number of them alive on one port, and replaces them one by one.

A front that leaves goes on until its connections are done, and another front takes its place before. So there may be
more fronts than asked for meanwhile.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import count

from text_generation_common.errors import CommandError
from text_generation_common.link import LinkMessage, ReplicaReport
from text_generation_common.tasks import cancelled
from text_generation_launcher.kept_process import KeptProcess
from text_generation_launcher.process import Child
from text_generation_launcher.restarts import Restarts

logger = logging.getLogger("text_generation_launcher")

# Seconds of service after which a front has a clean record: fronts, unlike engines, do not tell of work done.
LONG_RUN_S = 60.0
# Seconds until a front that cannot be kept alive is started again, if others serve.
RETRY_S = 30.0


class FrontState(Enum):
    KEPT = auto()  # started again when it dies
    NEW = auto()  # takes the place of another front once it listens
    LEAVING = auto()


@dataclass(slots=True, eq=False)
class Front:
    number: int  # no two living fronts have the same number
    process: KeptProcess
    state: FrontState
    run: "asyncio.Task[None]"
    limit: asyncio.TimerHandle | None = None  # kills the front if it does not leave


class Fronts:
    """`run` is to be started as a task. `start` starts the process of a front, by its number and its end of the line to
    the launcher. A front that leaves is killed after `patience_s` seconds. `on_message` is called with the fronts'
    messages, and with the process that has sent them.
    """

    def __init__(
        self,
        start: Callable[[int, int], Awaitable[Child]],
        number: int,
        patience_s: float,
        on_message: Callable[[KeptProcess, LinkMessage], None] = lambda process, message: None,
        adapters: Callable[[], LinkMessage | None] = lambda: None,
        stands_by: Callable[[], bool] = lambda: False,
    ) -> None:
        """`adapters` and `stands_by`: see KeptProcess."""
        self._start = start
        self._number = number
        self._patience_s = patience_s
        self._on_message = on_message
        self._adapters = adapters
        self._stands_by = stands_by
        self._deployment: ReplicaReport | None = None
        self._fronts: list[Front] = []
        self._had_listened = False  # a front that has gone
        self._has_ended = asyncio.Event()
        self._is_restart_asked = asyncio.Event()
        self._retries: list[asyncio.TimerHandle] = []
        self._is_stopping = False

    @property
    def has_listened(self) -> bool:
        """Whether any front has ever served requests."""
        return self._had_listened or any(front.process.has_listened for front in self._fronts)

    @property
    def processes(self) -> list[KeptProcess]:
        return [front.process for front in self._fronts]

    def stop(self) -> None:
        """Asks all fronts to end, which they do when their requests are done; then `run` returns."""
        self._is_stopping = True
        self._cancel_retries()
        for front in self._fronts:
            front.process.stop()

    def report_engines(self, deployment: ReplicaReport) -> None:
        """Tells all fronts, and those that come later, of the replicas."""
        self._deployment = deployment
        for front in self._fronts:
            front.process.report_engines(deployment)

    def restart(self) -> None:
        """Replaces all fronts, one after another. A restart that is asked for meanwhile comes afterwards."""
        self._is_restart_asked.set()

    async def run(self) -> None:
        """Keeps the fronts running until `stop`. Raises a CommandError when another start would not help and no other
        front serves."""
        for _ in range(self._number):
            self._add(FrontState.KEPT)
        restarting = asyncio.create_task(self._keep_restarting())
        try:
            while self._fronts:
                await self._has_ended.wait()
                self._has_ended.clear()
                for front in [front for front in self._fronts if front.run.done()]:
                    self._remove(front)
        finally:
            self._cancel_retries()
            await cancelled(restarting, *(front.run for front in self._fronts))

    def _add(self, state: FrontState) -> Front:
        used = {front.number for front in self._fronts}
        number = next(number for number in count() if number not in used)
        process = KeptProcess(
            partial(self._start, number),
            f"Webserver {number}",
            lambda message: self._on_message(process, message),
            lambda: None,
            Restarts(long_run_s=LONG_RUN_S),
            waits_for_shards=False,
            on_draining=lambda: self._replace(front),
            adapters=self._adapters,
            stands_by=self._stands_by,
        )
        # The first start of a front that takes the place of one that served may fail for once.
        process.has_listened = self.has_listened and state is FrontState.KEPT
        if self._deployment is not None:
            process.report_engines(self._deployment)
        front = Front(number, process, state, asyncio.create_task(process.run(), name=process.title))
        front.run.add_done_callback(lambda _: self._has_ended.set())
        self._fronts.append(front)
        return front

    def _replace(self, front: Front) -> None:
        """Another than the launcher has asked the front to end."""
        logger.info("%s leaves, another one takes its place", front.process.title)
        self._part_from(front)
        self._add(FrontState.KEPT)

    def _part_from(self, front: Front) -> None:
        front.state = FrontState.LEAVING
        front.limit = asyncio.get_running_loop().call_later(self._patience_s, front.process.kill)

    def _remove(self, front: Front) -> None:
        """Raises the CommandError of a front that cannot be kept alive, if no other one serves."""
        self._fronts.remove(front)
        self._had_listened |= front.process.has_listened
        if front.limit is not None:
            front.limit.cancel()
        error = front.run.exception()
        if error is None:
            return
        others_serve = any(other.process.listening.is_set() for other in self._fronts)
        if not isinstance(error, CommandError) or (front.state is FrontState.KEPT and not others_serve):
            raise error
        logger.error("%s: %s", front.process.title, error.reason)
        if front.state is FrontState.KEPT and not self._is_stopping:
            logger.error("%s is started again in %.0f s; the others go on", front.process.title, RETRY_S)
            self._retries.append(asyncio.get_running_loop().call_later(RETRY_S, self._add, FrontState.KEPT))

    def _cancel_retries(self) -> None:
        for retry in self._retries:
            retry.cancel()
        self._retries.clear()

    async def _keep_restarting(self) -> None:
        while True:
            await self._is_restart_asked.wait()
            self._is_restart_asked.clear()
            await self._restart_each()

    async def _restart_each(self) -> None:
        old = [front for front in self._fronts if front.state is FrontState.KEPT]
        logger.info("Restarting %d webservers, one after another", len(old))
        for front in old:
            if self._is_stopping:
                return
            if front.state is not FrontState.KEPT or front.run.done():
                continue  # another front has replaced this one meanwhile
            if not await self._listens(new := self._add(FrontState.NEW)):
                logger.error("The restart is given up: %s does not serve; the others go on", new.process.title)
                return
            new.state = FrontState.KEPT
            self._part_from(front)
            front.process.leave()
        logger.info("Restarted %d webservers", len(old))

    async def _listens(self, new: Front) -> bool:
        """Waits until the front serves requests, or has ended."""
        listening = asyncio.create_task(new.process.listening.wait())
        try:
            await asyncio.wait([listening, new.run], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(listening)
        return new.process.listening.is_set()
