"""How many replicas a deployment needs, by the wait that its queues expect. Pure: no clock, no input or output.

Growth is quick: when every replica expects a wait, replicas are added within seconds, as many as the requests ask for.
Shrinking is slow: one replica at a time, and only if the others would carry the load. What a replica carries is not
configured. The policy learns it: `_full` is the number of requests of a replica at which waits began. A removal after
which waits began is a mistake, and is not repeated under such a load for some hours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, isfinite
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Demand:
    """The load of a deployment. Several fronts' words are added up, or the greatest counts, field by field."""

    wait_s: float  # expected wait of a request that arrives now, at the replica where it is least; inf: none serves
    requests: int  # requests that have not ended, those in queues included
    used: float = 0.0  # part of the permits of all serving replicas that is taken, 0 to 1; rows, if these are scarcer

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"ser_json_inf_nan": "constants"}  # `wait_s` as JSON: Infinity


def joint_demand(demands: Sequence[Demand]) -> Demand | None:
    """What the clients of all fronts want; None: no front has reported any. A front that reaches no engine does not
    know how long others wait: its wait counts only if no front knows better."""
    if not demands:
        return None
    waits = [demand.wait_s for demand in demands if isfinite(demand.wait_s)]
    requests, used = sum(demand.requests for demand in demands), sum(demand.used for demand in demands)
    return Demand(max(waits, default=inf), requests, used)


@dataclass(frozen=True, slots=True)
class ScalingPace:
    """The constants, chosen by simulation: docs/replicas.md."""

    wait_s: float = 1.0  # an expected wait that is too long
    used: float = 0.95  # part of the permits beyond which new requests are refused sooner or later
    up_s: float = 5.0  # a wait has to be too long for this many seconds before replicas are added
    growth: float = 1.5  # replicas that serve, and those that start, are at most this many times those that serve
    headroom: float = 0.85  # replicas are added when those that serve have this part of what they carry, without waits
    down_s: float = 300.0  # the load has to be small for this many seconds before each removal
    rest: float = 0.5  # the remaining replicas get at most this part of what they carry
    smooth_s: float = 30.0  # time constant of the mean number of requests
    regret_s: float = 900.0  # a removal was a mistake if replicas are added within this many seconds after it
    remember_s: float = 6 * 3600.0  # a mistake is remembered for this many seconds
    like: float = 0.7  # a load of this part of the one that was too much counts as the same


@dataclass(frozen=True, slots=True)
class Removal:
    """A replica was removed."""

    at_s: float
    remaining: int
    requests: float  # mean number of requests at that time


class ReplicaPolicy:
    """Says how many replicas to run, `least` to `most`. It is asked about once a second."""

    def __init__(self, least: int, most: int, pace: ScalingPace | None = None) -> None:
        if not 1 <= least <= most:
            raise ValueError(f"{least} to {most} replicas: the least number is at least 1, and at most the greatest")
        self._least, self._most = least, most
        self._pace = pace or ScalingPace()
        self._wanted = least
        self._full: float | None = None  # requests of one replica at which waits began; None: no wait was seen yet
        self._mean: float | None = None  # requests of all replicas, smoothed
        self._asked_s = 0.0
        self._busy_since_s: float | None = None
        self._calm_since_s: float | None = None
        self._removal: Removal | None = None  # the last one, until replicas are added
        self._mistakes: dict[int, Removal] = {}  # by the number of replicas that remained
        self._pending = 0  # replicas for which no machine has room

    def wanted(self, now_s: float, demand: Demand, running: int, pending: int = 0) -> int:
        """The number of replicas that should run. `now_s`: seconds of a clock that never goes back. `running`: replicas
        that serve, without those that start or drain. `pending`: replicas for which no machine has room. As long as
        there are any, no more replicas are wanted, and a removal takes one of them."""
        self._pending = pending
        if running > 0:
            self._note(now_s, demand)
            if self._is_busy(demand):
                self._calm_since_s = None
                self._grow(now_s, demand, running)
            else:
                self._busy_since_s = None
                self._learn_calm(now_s, demand, running)
                self._keep_headroom(now_s, running)
                self._shrink(now_s, demand, running)
        self._asked_s = now_s
        return self._wanted

    def _note(self, now_s: float, demand: Demand) -> None:
        mean = self._mean if self._mean is not None else float(demand.requests)
        self._mean = mean + (demand.requests - mean) * self._part(now_s, self._pace.smooth_s)

    def _part(self, now_s: float, time_s: float) -> float:
        return 1 - exp(-max(0.0, now_s - self._asked_s) / time_s)

    def _is_busy(self, demand: Demand) -> bool:
        return demand.wait_s > self._pace.wait_s or demand.used > self._pace.used

    def _grow(self, now_s: float, demand: Demand, running: int) -> None:
        if self._busy_since_s is None:
            self._busy_since_s = now_s
            here = max(1.0, demand.requests / running)
            self._full = here if self._full is None else (self._full + here) / 2
        if now_s - self._busy_since_s < self._pace.up_s:
            return
        full = self._full or 1.0
        at_least = running + 1 if self._wanted <= running else self._wanted
        self._raise(now_s, max(at_least, ceil(demand.requests / full)), running)

    def _keep_headroom(self, now_s: float, running: int) -> None:
        if self._full is not None and self._mean is not None:
            needed = ceil(self._mean / (self._pace.headroom * self._full))
            if needed > self._wanted:
                self._raise(now_s, needed, running)

    def _raise(self, now_s: float, needed: int, running: int) -> None:
        """Wants more replicas, never fewer. The growth is bounded, because requests that have piled up need replicas
        only for a while, and because what cannot start now may never start."""
        wanted = min(needed, max(running + 1, int(self._pace.growth * running)), self._most)
        if wanted <= self._wanted or self._pending:
            return
        if self._removal is not None and now_s - self._removal.at_s < self._pace.regret_s:
            self._mistakes[self._removal.remaining] = self._removal
        self._removal = self._calm_since_s = None
        self._wanted = wanted

    def _learn_calm(self, now_s: float, demand: Demand, running: int) -> None:
        """More requests than `_full` without a wait: the replicas carry more than was known. The mean alone would not
        show it: after a wait it still contains the requests that waited."""
        here = min(self._mean or 0.0, demand.requests) / running
        if self._full is not None and here > self._full:
            self._full += (here - self._full) * self._part(now_s, self._pace.smooth_s)

    def _shrink(self, now_s: float, demand: Demand, running: int) -> None:
        remaining = min(running, self._wanted - 1)
        if remaining < self._least or not self._would_carry(now_s, remaining, demand, running):
            self._calm_since_s = None
            return
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        if now_s - self._calm_since_s >= self._pace.down_s:
            self._wanted -= 1
            self._calm_since_s = now_s
            if not self._pending:  # The removal of a replica that never served shows nothing of the others.
                self._removal = Removal(now_s, remaining, self._mean or 0.0)

    def _would_carry(self, now_s: float, remaining: int, demand: Demand, running: int) -> bool:
        mean = self._mean or 0.0
        mistake = self._mistakes.get(remaining)
        if mistake and now_s - mistake.at_s < self._pace.remember_s and mean > self._pace.like * mistake.requests:
            return False
        if demand.used * running > self._pace.rest * remaining:
            return False
        return self._full is None or mean <= self._pace.rest * self._full * remaining
