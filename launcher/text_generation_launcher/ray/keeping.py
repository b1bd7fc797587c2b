"""Keeps one replica on some machine of the cluster: decides what to ask Ray for next, without input, output or a
clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from text_generation_common.backoff import Backoff
from text_generation_launcher.ray.values import EnginePhase, EngineState, Order, RayPhase, RayStatus

# Seconds before a lost replica is started again: the first time, and at most.
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 30.0
# Seconds for which a replica serves before earlier losses are forgotten.
LONG_RUN_S = 60.0
# Seconds after which an actor answers that nothing has changed.
WATCH_S = 5.0
# Seconds before a call is repeated whose answer was lost on the network.
UNSURE_S = 1.0
# Seconds between two checks whether a replica has room, and after which a replica without room is reported as pending.
LOOK_S, PLACING_S = 1.0, 2.0
# Seconds that an actor with room gets for its first answer. An actor that Ray was starting when its head died never
# answers.
ACTOR_START_S = 60.0


@dataclass(frozen=True, slots=True)
class ActorLost:
    """The actor cannot be started, or Ray reports it as dead. Actor and engine may still live on a machine that Ray
    does not reach."""

    reason: str


@dataclass(frozen=True, slots=True)
class ActorUnsure:
    """The answer to the call was lost. The actor may still live."""


@dataclass(frozen=True, slots=True)
class ActorCall:
    """A call of a replica's actor that is not answered yet."""

    name: str
    number: int


Answer = EngineState | ActorLost | ActorUnsure


class ReplicaCluster(Protocol):
    """The calls of Ray for replicas. Each method may raise ClusterLost, which ends the driver."""

    def start(self, name: str, order: Order) -> ActorCall:
        """Asks Ray for room and an actor for the replica, unless it has them, and calls the actor's `start`."""

    def watch(self, name: str, known: EngineState, seconds: float) -> ActorCall: ...

    def end(self, name: str) -> None:
        """Calls the actor's `end`, which ends its engine."""

    def remove(self, name: str) -> None:
        """Removes the replica's actor and its room, as far as they exist."""

    def has_room(self, name: str) -> bool:
        """Whether Ray has found a machine for the replica."""

    def names(self) -> list[str]:
        """Names of the replicas that have an actor."""

    def answers(self, calls: Sequence[ActorCall], seconds: float) -> dict[ActorCall, Answer]:
        """The answers to `calls` that have come. Waits at most `seconds` for the first answer."""


class ReplicaKeeper:
    """Keeps one replica, or the fronts of one machine, until it is drained. The address of an engine whose actor is
    lost is kept until the next engine serves: fronts may reach an engine that Ray does not reach."""

    def __init__(self, name: str, order: Order, cluster: ReplicaCluster, address: str = "") -> None:
        self.name = name
        self.call: ActorCall | None = None
        self.is_gone = False
        self._order = order
        self._cluster = cluster
        self._address = address
        self._state: EngineState | None = None  # None: the actor has not answered yet, or there is none
        self._is_draining = False
        self._has_room = self._is_pending = False
        self._waits_since_s: float | None = None  # when the replica got room, while its actor has not answered
        self._looked_s = self._began_s = float("-inf")
        self._next_s = float("-inf")
        self._backoff = Backoff(FIRST_WAIT_S, MAX_WAIT_S, LONG_RUN_S)
        self._failures = 0  # number of consecutive starts after which no engine or front served
        self._why = ""

    @property
    def address(self) -> str:
        return self._address

    @property
    def status(self) -> RayStatus:
        node, demand = ("", None) if self._state is None else (self._state.node, self._state.demand)
        return RayStatus(
            self.name,
            self._phase,
            address=self._address,
            node=node,
            why=self._why,
            failures=self._failures,
            demand=demand,
        )

    def drain(self) -> None:
        """Asks the engine to end when its requests are done. The replica is gone after that."""
        if self._is_draining:
            return
        self._is_draining = True
        self._next_s = float("-inf")
        if self._state is not None:
            self._cluster.end(self.name)
        elif self.call is not None and not self._cluster.has_room(self.name):
            self._end()  # No engine was started.

    def turn(self, now_s: float) -> None:
        """Makes the next call, if it is time and no call is open."""
        if self.call is None and now_s >= self._next_s:
            if self._state is None:
                self._begin(now_s)
            else:
                self.call = self._cluster.watch(self.name, self._state, WATCH_S)
        if self._state is None and now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._has_room = self._cluster.has_room(self.name)
            self._is_pending = self.call is not None and not self._has_room and now_s - self._began_s >= PLACING_S
        self._check_start(now_s)

    def _check_start(self, now_s: float) -> None:
        """Removes an actor that does not start in time, so that another actor takes its place."""
        if self._state is not None or self.call is None or not self._has_room:
            self._waits_since_s = None
        elif self._waits_since_s is None:
            self._waits_since_s = now_s
        elif now_s - self._waits_since_s >= ACTOR_START_S:
            self.call = self._waits_since_s = None
            self._cluster.remove(self.name)
            self._lose(f"its actor has not started within {ACTOR_START_S:.0f} s", now_s)

    def answered(self, answer: Answer, now_s: float) -> None:
        self.call = None
        if isinstance(answer, ActorUnsure):
            self._next_s = now_s + UNSURE_S
        elif isinstance(answer, ActorLost):
            self._lose(answer.reason, now_s)
        elif answer.phase is EnginePhase.ENDED:
            if self._state is not None and self._state.address == self._address:
                self._address = ""
            if not self._is_draining:
                self._cluster.remove(self.name)  # with its placement group, so that Ray may choose another machine
            self._lose(f"its engine has ended: {answer.why}", now_s)
        else:
            self._state = answer
            self._why = answer.why
            if answer.phase is EnginePhase.SERVING:
                self._address = answer.address
                self._failures = 0
                self._backoff.came_up(now_s)
            if self._is_draining:
                self._cluster.end(self.name)

    def _begin(self, now_s: float) -> None:
        self._began_s = now_s
        if self._is_draining:  # An earlier driver may have made an actor for it.
            self.call = self._cluster.watch(self.name, EngineState(EnginePhase.STARTING), 0.0)
        else:
            self.call = self._cluster.start(self.name, self._order)

    def _lose(self, reason: str, now_s: float) -> None:
        self._state = None
        self._has_room = self._is_pending = False
        self._why = reason
        self._failures += not self._backoff.is_up
        self._next_s = now_s + self._backoff.failed(now_s)
        if self._is_draining:
            self._end()

    def _end(self) -> None:
        self._cluster.remove(self.name)
        self._address = ""
        self.is_gone = True

    @property
    def _phase(self) -> RayPhase:
        if self._is_draining:
            return RayPhase.DRAINING
        if self._state is None:
            return RayPhase.PENDING if self._is_pending else RayPhase.STARTING
        return RayPhase.SERVING if self._state.phase is EnginePhase.SERVING else RayPhase.STARTING
