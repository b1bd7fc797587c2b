"""Keeps requests that may have ended an engine apart until they make a token, so that a bad request is found.

A loss is the unexpected end of an engine. All requests of a front that had begun on the engine are *suspects*, unless
the cause came from outside: a cut link, a stopped process. The suspects of one loss are a *group*; the suspects that
had made no token on the engine are likelier to be the cause, and are a group of their own. The requests of a group go
to one engine only, and that engine takes no suspects of another group. If a group meets another loss, its requests
part: into halves, and then each alone. A suspect that is tried alone is the only request in its engine's steps, and the
engine takes no other request of this front, until the suspect has made a token. The third loss that a request meets
alone ends it.

A group waits until every engine that it may have ended is back, so that a bad request has one engine down at a time:
for at most FIRST_WAIT_S, and WAIT_S from its second loss on. Requests that had made tokens on the engine of their first
loss do not wait: their streams go on at once, because they are hardly ever the cause.

So each bad request ends at most 3 + MAX_ALONE engines, one after the other, and one engine more if it ends some of them
before they have reported that it has begun. A good request fails only if another cause ends the engine each time that
the request is tried alone.

A request that had not begun may still be the cause: it may end its engine before the engine has reported that the
request has begun. So this request too waits until the engine is back, at most FIRST_WAIT_S, and is free then. From its
second loss without progress on, the request is a suspect; losses of engines that tried a suspect alone do not count. A
suspect that had not begun on a lost engine is counted as aboard from the second such loss on: at the first such loss
another request is the likelier cause.

A request may also hang its engine, which falls silent then. Silence has most often another cause, so only a request
that meets several silences in a row without a token is a suspect (`silences.py`). Then silences count for its group as
other losses do.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from text_generation_router.fleet.silences import Silences

MAX_ALONE = 3  # losses met alone that end a request
# Maximum number of seconds for which suspects wait until the engines that they may have ended are back: after their
# first loss, which a lost machine may as well have caused, and after later losses.
FIRST_WAIT_S, WAIT_S = 10.0, 120.0
# Maximum wait in seconds of suspects that may have hung engines: a launcher kills an engine after 8 s of silence.
SILENT_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class LostRequests:
    """The requests of a lost engine that may be the cause of the loss, oldest first. `begun` and `queued` are empty if
    the cause came from outside, such as a cut link."""

    name: str  # name of the loss, the same on all fronts: the `engine_id` of the lost process
    begun: Collection[int] = ()
    proven: Collection[int] = ()  # part of `begun`: requests that have made a token there
    queued: Collection[int] = ()  # requests that had not begun
    has_died: bool = True  # False: the engine still runs, so no request waits for its return
    silent: Collection[int] = ()  # requests without a token on the engine, if it fell silent
    is_sure: bool = False  # whether the engine itself was silent, and not the front's own link cut


class SuspectTrial(NamedTuple):
    """How a suspect is submitted."""

    group: str  # name of the suspect's group, the same on all fronts
    is_alone: bool


@dataclass(slots=True, eq=False)
class HeldRequest:
    """A request that is not a suspect, and waits until the engines that it may have ended are back."""

    down: set[int]
    waits_until: float


@dataclass(slots=True, eq=False)
class SuspectGroup:
    """Suspects that go to one engine together."""

    key: str  # names the loss, and which part of its suspects the group is. All fronts make the same key
    losses: int  # losses in a row that the group has met before its requests are alone
    loss: str  # name of the newest loss
    requests: set[int] = field(default_factory=set)
    engine: int | None = None  # the engine that has requests of the group
    sent: set[int] = field(default_factory=set)  # requests of the group that the engine has
    is_alone: bool = False  # whether the group began with one request, which is tried alone
    alone_losses: int = 0  # losses that the only request of the group has met alone
    counts_queued: bool = False  # whether losses count that meet a request before its first step
    has_hung: bool = False  # whether the group are suspects because engines fell silent
    down: set[int] = field(default_factory=set)  # engines that the group may have ended and that are not back
    waits_until: float = 0.0  # time until which the group waits for these engines


class Suspects:
    """The suspects of one front. Requests and engines are known by numbers; the number of a lost engine may be used
    again. `now`: seconds of a clock that never goes back."""

    def __init__(self, front: str = "") -> None:
        """`front`: a name that no other front has."""
        self._front = front
        self._groups: dict[int, SuspectGroup] = {}  # for each suspect, its group
        self._trials: dict[int, SuspectGroup] = {}  # for each engine that has suspects, their group
        # Number of losses that each request has met in the queue since its last token. Losses of engines that tried a
        # suspect alone do not count.
        self._met: dict[int, int] = {}
        self._held: dict[int, HeldRequest] = {}
        self._silences = Silences()

    def __contains__(self, request: int) -> bool:
        return request in self._groups

    def trial(self, request: int) -> SuspectTrial | None:
        """How the request is to be submitted as a suspect. None: the request is not a suspect."""
        group = self._groups.get(request)
        return SuspectTrial(group.key, group.is_alone) if group is not None else None

    def __len__(self) -> int:
        """Number of suspects."""
        return len(self._groups)

    @property
    def are_free(self) -> bool:
        """Whether every engine may get every request."""
        return not (self._groups or self._held)

    def losses(self, request: int) -> int:
        """Number of losses that the suspect has met since its last token."""
        group = self._groups.get(request)
        return 0 if group is None else group.losses + group.alone_losses

    def engines_for(self, request: int, engines: Iterable[int], now: float) -> list[int]:
        """The engines of `engines` that may get the request now. An empty list: the request waits."""
        group = self._groups.get(request)
        if group is None:
            held = self._held.get(request)
            if held is not None and now < held.waits_until:
                return []
            return [engine for engine in engines if not self._is_closed(engine)]
        if group.engine is not None:
            return [engine for engine in engines if engine == group.engine]
        if group.down and now < group.waits_until:
            return []
        return [engine for engine in engines if engine not in self._trials]

    def _is_closed(self, engine: int) -> bool:
        group = self._trials.get(engine)
        return group is not None and group.is_alone

    def send(self, request: int, engine: int) -> None:
        """Notes that the request was submitted to one of `engines_for`."""
        self._held.pop(request, None)
        self._silences.sent(request)
        if (group := self._groups.get(request)) is not None:
            assert group.engine in (None, engine) and self._trials.get(engine, group) is group
            group.engine = engine
            group.sent.add(request)
            self._trials[engine] = group

    def take_back(self, request: int) -> None:
        """Notes that the request has left the engine without progress."""
        if (group := self._groups.get(request)) is not None:
            self._unsend(group, request)

    def inherit(self, request: int, heir: int) -> None:
        """Lets the losses of `request` count against `heir` as well: a group that takes some or all of its members."""
        if (group := self._groups.get(request)) is not None and heir != request:
            group.requests.add(heir)
            self._groups[heir] = group
        if request in self._met:
            self._met[heir] = self._met[request]
        if request in self._held:
            self._held[heir] = self._held[request]
        self._silences.inherit(request, heir)

    def clear(self, request: int) -> bool:
        """Notes that the request has made a token, or has ended, so nothing counts against it. Returns whether it was
        a suspect."""
        self._silences.forget(request)
        self._met.pop(request, None)
        return self._leave(request)

    def _leave(self, request: int) -> bool:
        self._held.pop(request, None)
        group = self._groups.pop(request, None)
        if group is not None:
            group.requests.discard(request)
            self._unsend(group, request)
        return group is not None

    def _unsend(self, group: SuspectGroup, request: int) -> None:
        group.sent.discard(request)
        if not group.sent and group.engine is not None:
            del self._trials[group.engine]
            group.engine = None

    def returned(self, engine: int, life: str = "", now: float = 0.0) -> list[int]:
        """Notes that the engine is back. `life`: its `engine_id` now; empty: the engine will never be back. Returns the
        requests that have to fail, which are not suspects any more."""
        silence = self._silences.returned(engine, life)
        ended = self._lose_silent(engine, silence.life, silence.requests, now) if silence is not None else []
        for group in set(self._groups.values()):
            group.down.discard(engine)
        for held in self._held.values():
            held.down.discard(engine)
        self._held = {request: held for request, held in self._held.items() if held.down}
        return ended

    def absolve(self, loss: str) -> None:
        """Notes that the engine of this loss still runs: only the connection to it was lost."""
        for group in set(self._groups.values()):
            if group.loss != loss:
                continue
            if group.losses == 1:
                for request in list(group.requests):
                    self.clear(request)
            elif group.alone_losses and not group.has_hung:
                group.alone_losses -= 1

    def lose(self, engine: int, loss: LostRequests, now: float) -> list[int]:
        """Notes the loss of an engine. Returns the requests that have to fail because of this loss, which are not
        suspects any more."""
        tried = self._trials.pop(engine, None)
        if tried is not None:
            tried.engine = None
            tried.sent.clear()
        aboard = [request for request in loss.begun if tried is not None and request in tried.requests]
        if tried is not None:
            queued = [request for request in loss.queued if request in tried.requests]
            if not tried.counts_queued and [request for request in queued if self._meet_queued(request)]:
                tried.counts_queued = True
            aboard += queued if tried.counts_queued else []
        fresh = [request for request in loss.begun if request not in self._groups]
        proven = set(loss.proven)
        parts = {
            loss.name: [request for request in fresh if request in proven],
            f"{loss.name}/new": [request for request in fresh if request not in proven],
        }
        for key, requests in parts.items():
            wait_s = 0.0 if key == loss.name else FIRST_WAIT_S
            self._enter(SuspectGroup(key, 1, loss.name, down={engine}, waits_until=now + wait_s), requests)
        if loss.has_died:
            self._hold_queued(loss, engine, now)
        if tried is None or not (tried.is_alone and aboard):
            self._count_queued(loss, engine, now)
        if loss.silent:
            return self._meet_silence(engine, loss, now)
        return self._part(tried, aboard, engine, loss.name, now) if tried is not None and aboard else []

    def _meet_silence(self, engine: int, loss: LostRequests, now: float) -> list[int]:
        """Notes that the engine fell silent with requests that had made no token on it. Returns the requests that have
        to fail."""
        hung = [request for request in loss.silent if (group := self._groups.get(request)) and group.has_hung]
        if loss.is_sure:
            ended = self._lose_silent(engine, loss.name, hung, now)
        else:
            ended = []
            self._silences.note_unsure(engine, loss.name, hung)
            for request in hung:
                self._wait_for(self._groups[request], {engine}, now)
        others = [request for request in loss.silent if request not in hung]
        fresh = []
        for request in self._silences.count(engine, loss.name, others, loss.is_sure):
            if (group := self._groups.get(request)) is None:
                fresh.append(request)
            else:
                group.has_hung = True  # earlier losses of its requests still count
                self._wait_for(group, self._silences.down(request), now)
        suspects = SuspectGroup(f"{loss.name}/silent", 2, loss.name, counts_queued=True, has_hung=True)
        self._wait_for(suspects, set(), now)
        self._enter(suspects, fresh)
        return ended

    def _wait_for(self, group: SuspectGroup, engines: set[int], now: float) -> None:
        group.down |= engines
        group.waits_until = max(group.waits_until, now + SILENT_WAIT_S)

    def _lose_silent(self, engine: int, loss: str, suspects: Collection[int], now: float) -> list[int]:
        """Counts the engine's silence as a loss of `suspects`, which are suspects because of earlier silences. Returns
        the requests that have to fail."""
        aboard: dict[SuspectGroup, list[int]] = {}
        for request in suspects:
            aboard.setdefault(self._groups[request], []).append(request)
        return [end for group, requests in aboard.items() for end in self._part(group, requests, engine, loss, now)]

    def _part(self, group: SuspectGroup, aboard: list[int], engine: int, loss: str, now: float) -> list[int]:
        """Notes another loss of the group. `aboard`: the group's requests that were on the lost engine."""
        if group.is_alone:
            group.alone_losses += 1
            group.loss, group.waits_until = loss, now + WAIT_S
            group.down.add(engine)
            if group.alone_losses == MAX_ALONE:
                for request in aboard:
                    self.clear(request)
                return aboard
            return []
        middle = (len(aboard) + 1) // 2
        halves = [aboard[:middle], aboard[middle:]]
        for half, requests in enumerate(halves if group.losses == 1 else [[request] for request in aboard]):
            is_alone = len(requests) == 1
            key = f"{loss}/{self._front}.{requests[0]}" if is_alone else f"{loss}/{half}"
            part = SuspectGroup(key, group.losses + 1, loss, is_alone=is_alone)
            part.counts_queued, part.has_hung = group.counts_queued, group.has_hung
            part.down, part.waits_until = group.down | {engine}, now + WAIT_S
            self._enter(part, requests)
        return []

    def _hold_queued(self, loss: LostRequests, engine: int, now: float) -> None:
        for request in loss.queued:
            if (group := self._groups.get(request)) is not None:
                group.down.add(engine)
                group.waits_until = now + WAIT_S
            else:
                self._held[request] = HeldRequest({engine}, now + FIRST_WAIT_S)

    def _count_queued(self, loss: LostRequests, engine: int, now: float) -> None:
        """Counts a loss against the requests that were in the queue, because no request that was tried alone caused
        it."""
        found = []
        for request in loss.queued:
            if request not in self._groups and self._meet_queued(request):
                found.append(request)
        until = now + WAIT_S
        group = SuspectGroup(f"{loss.name}/queued", 2, loss.name, counts_queued=True, down={engine}, waits_until=until)
        self._enter(group, found)

    def _meet_queued(self, request: int) -> bool:
        """Counts a loss that the request met before it had begun. Returns whether the loss makes the request a
        suspect."""
        self._met[request] = self._met.get(request, 0) + 1
        return self._met[request] > 1

    def _enter(self, group: SuspectGroup, requests: list[int]) -> None:
        for request in requests:
            self._leave(request)
            group.down |= self._silences.down(request)
            if group.has_hung:
                self._silences.forget(request)
            group.requests.add(request)
            self._groups[request] = group


def meeting_engine(key: str, engines: Mapping[int, str]) -> int:
    """The engine that all fronts choose for a group without talking to each other: the one whose name and `key` have
    the greatest hash. `engines`: the names of the engines that may be chosen, at least one."""

    def rank(engine: int) -> bytes:
        return blake2b(f"{key}\0{engines[engine]}".encode(), digest_size=8).digest()

    return max(engines, key=rank)
