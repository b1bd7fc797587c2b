"""The replicas of one server: as many as are wanted, each kept alive on its own."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from text_generation_common.backoff import Backoff
from text_generation_common.errors import CommandError
from text_generation_common.flags.cluster import MAX_REPLICAS
from text_generation_common.link import ReplicaNote, ReplicaReport, ReplicaState
from text_generation_common.tasks import cancelled
from text_generation_launcher.errors import ScaleRefused

logger = logging.getLogger("text_generation_launcher")

# Seconds until the first new start of a replica that could not be kept alive; the wait doubles up to the longest. A
# replica that was ready for LONG_RUN_S seconds begins with the first wait again.
FIRST_RETRY_S, MAX_RETRY_S = 5.0, 300.0
LONG_RUN_S = 600.0
# Order in which replicas leave: those that serve least go first.
_LEAVE_FIRST = (ReplicaState.PENDING, ReplicaState.FAILED, ReplicaState.STARTING, ReplicaState.READY)


class AnyReplica(Protocol):
    """What a set needs of each replica, an engine and its shards, on this machine or elsewhere. `run` is started as a
    task, once."""

    @property
    def name(self) -> str: ...

    @property
    def endpoint(self) -> str | None:
        """Where fronts connect, as text (`cluster/endpoints.py`); None: nowhere yet. Fronts may connect before the
        replica is ready, and try again until they can."""

    @property
    def is_ready(self) -> bool:
        """Whether its engine serves and its shards are ready."""

    @property
    def is_pending(self) -> bool:
        """Whether no machine has room for the replica, which starts once one has."""

    @property
    def waits_for(self) -> str:
        """Why the replica is not ready, as far as there is something to say; "": nothing."""

    async def run(self) -> None:
        """Keeps the replica alive, and returns after `stop`. Raises a CommandError when the replica cannot be kept
        alive; it may be made again later. In both cases nothing of it is left running. When the task is cancelled, its
        children live on: the supervisor stops them."""

    def stop(self) -> None:
        """Lets the replica drain: it refuses new requests, its queued requests move, and the running ones end or move.
        Then `run` returns."""


# Makes the replica of a number. The callback is to be called whenever `endpoint` or `is_ready` changes.
MakeReplica = Callable[[int, Callable[[], None]], AnyReplica]


@dataclass(slots=True, eq=False)
class KeptReplica:
    """A replica of the set, from its first start until it leaves."""

    number: int
    replica: AnyReplica
    backoff: Backoff
    task: "asyncio.Task[None] | None" = None
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str = ""  # why the replica waits for its next start; "": it runs

    @property
    def state(self) -> ReplicaState:
        if self.leaving.is_set():
            return ReplicaState.DRAINING
        if self.failure:
            return ReplicaState.FAILED
        if self.replica.is_pending:
            return ReplicaState.PENDING
        return ReplicaState.READY if self.replica.is_ready else ReplicaState.STARTING

    @property
    def note(self) -> ReplicaNote:
        endpoint = None if self.failure else self.replica.endpoint
        return ReplicaNote(self.replica.name, self.state, endpoint, self.failure or self.replica.waits_for)


class ReplicaSet:
    """`run` is to be started as a task, once."""

    def __init__(
        self,
        make: MakeReplica,
        wanted: int,
        most: int = MAX_REPLICAS,
        few: str = "",
        retry_s: float = FIRST_RETRY_S,
    ) -> None:
        """`most`: number of replicas for which there is room; `few` says why there are not more."""
        self._make = make
        self._wanted = wanted
        self._most = most
        self._few = few
        self._watchers: list[Callable[[ReplicaReport], None]] = []
        self._retry_s = retry_s
        self._members: dict[int, KeptReplica] = {}
        self._changed = asyncio.Event()
        self._is_stopping = False
        self._reported: ReplicaReport | None = None
        self.has_served = False  # whether any replica was ready

    @property
    def report(self) -> ReplicaReport:
        """The replicas, and how many are wanted."""
        return ReplicaReport(self._wanted, tuple(member.note for member in self._members.values()))

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self.report.endpoints

    def watch(self, watcher: Callable[[ReplicaReport], None]) -> None:
        """From now on `watcher` is called with every change of the deployment."""
        self._watchers.append(watcher)

    def scale(self, wanted: int) -> None:
        """From now on there are to be `wanted` replicas. ScaleRefused if there cannot be."""
        if wanted < 1:
            raise ScaleRefused(f"{wanted} replicas cannot serve", "ask for 1 or more, or stop the server")
        if wanted > self._most:
            raise ScaleRefused(f"{wanted} replicas are more than {self._most}{self._few}", "ask for fewer")
        if self._is_stopping:
            raise ScaleRefused("the server is stopping", "start it again with another --replicas")
        logger.info("Scaling from %d to %d replicas", self._wanted, wanted)
        self._wanted = wanted
        self._report_change()  # before the command that asked is answered
        self._note_change()

    def stop(self) -> None:
        """Lets all replicas drain; then `run` returns."""
        self._is_stopping = True
        self._note_change()

    async def run(self) -> None:
        """Keeps the replicas alive until `stop`. Raises a CommandError when no replica can be kept alive."""
        try:
            while not (self._is_stopping and not self._members):
                self._reconcile()
                self._report_change()
                self._changed.clear()
                await self._until_changed()
        finally:
            await cancelled(*(member.task for member in self._members.values() if member.task is not None))

    async def _until_changed(self) -> None:
        changed = asyncio.create_task(self._changed.wait())
        tasks = {member.task: member for member in self._members.values() if member.task is not None}
        try:
            await asyncio.wait([changed, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(changed)
        for task, member in tasks.items():
            if task.done():
                task.result()
                del self._members[member.number]
                logger.info("%s has left", member.replica.name)

    def _reconcile(self) -> None:
        wanted = 0 if self._is_stopping else self._wanted
        changes = plan_changes({number: each.state for number, each in self._members.items()}, wanted, self._most)
        for number in changes.start:
            self._start(number)
        for number in changes.drain:
            member = self._members[number]
            if not self._is_stopping:
                logger.info("%s drains", member.replica.name)
            member.leaving.set()
            member.replica.stop()

    def _start(self, number: int) -> None:
        member = KeptReplica(
            number, self._make(number, self._note_change), Backoff(self._retry_s, MAX_RETRY_S, LONG_RUN_S)
        )
        self._members[number] = member
        member.task = asyncio.create_task(self._keep(member), name=member.replica.name)

    async def _keep(self, member: KeptReplica) -> None:
        """Keeps one replica running until it leaves. Raises the error that ends the server."""
        while True:
            try:
                return await member.replica.run()
            except CommandError as error:
                if member.leaving.is_set():
                    logger.error("%s did not leave in order: %s", member.replica.name, error.reason)
                    return
                await self._fail(member, error)
            if member.leaving.is_set():
                return
            member.replica = self._make(member.number, self._note_change)
            member.failure = ""
            self._note_change()

    async def _fail(self, member: KeptReplica, error: CommandError) -> None:
        """Waits until the next start is due, or the replica is to leave. Raises `error` if it ends the server."""
        others = [each.state for each in self._members.values() if each is not member]
        if ends_server(others, self.has_served):
            raise error
        wait_s = member.backoff.failed(time.monotonic())
        member.failure = error.reason
        name = member.replica.name
        logger.error("%s failed, the others serve: %s; starting it again in %.0fs", name, error.reason, wait_s)
        self._report_change()
        with suppress(TimeoutError):
            await asyncio.wait_for(member.leaving.wait(), wait_s)

    def _note_change(self) -> None:
        for member in self._members.values():
            if member.state is ReplicaState.READY:
                self.has_served = True
                member.backoff.came_up(time.monotonic())
        self._changed.set()

    def _report_change(self) -> None:
        """Reports the deployment to the watchers, if it has changed."""
        if (found := self.report) != self._reported:
            self._reported = found
            for watcher in self._watchers:
                watcher(found)


@dataclass(frozen=True, slots=True)
class SetChanges:
    """Numbers of replicas to start, and of those that are to drain."""

    start: tuple[int, ...] = ()
    drain: tuple[int, ...] = ()


def plan_changes(states: Mapping[int, ReplicaState], wanted: int, most: int) -> SetChanges:
    """What leads to `wanted` replicas. `states` has those that exist, `most` is the number of places for replicas: a
    place is free when the draining replica there has gone."""
    staying = [number for number, state in states.items() if state is not ReplicaState.DRAINING]
    if len(staying) > wanted:
        leaving = sorted(staying, key=lambda number: (_LEAVE_FIRST.index(states[number]), -number))
        return SetChanges(drain=tuple(leaving[: len(staying) - wanted]))
    free = [number for number in range(most) if number not in states]
    return SetChanges(start=tuple(free[: wanted - len(staying)]))


def ends_server(others: Collection[ReplicaState], has_served: bool) -> bool:
    """Whether the failure of a replica, which could not be kept alive, ends the server: no other replica (`others`)
    goes on, or the server never had a replica that was ready, so that the next start would fail like this one."""
    return not has_served or all(state is ReplicaState.FAILED for state in others)
