"""Keeps requests apart that may have ended an engine, until they make a token, so that a bad one is found.

A loss is the death of an engine. All requests that a front had begun there are *suspects*, unless the cause came from
outside: a cut link, a signal. The suspects of one loss are a *group*. The requests of a group go to one engine only,
and that engine takes no suspects of another group. If a group meets another loss, its requests part: into halves, and
then each alone. An engine that tries a suspect alone takes no other request of this front until the suspect has made a
token. The third loss that a request meets alone ends it.

So each bad request ends at most 3 + MAX_ALONE engines, one after the other. A good one fails only if, each time that it
is tried alone, another request is bad that had begun on the engine before.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

MAX_ALONE = 3  # losses met alone that end a request


@dataclass(slots=True, eq=False)
class SuspectGroup:
    """Suspects that go to one engine together."""

    key: str  # the loss, and which half: the same on all fronts
    losses: int  # losses that its requests have met in a row: 1, 2 or 3 until they are alone
    requests: set[int] = field(default_factory=set)
    engine: int | None = None  # the engine that has any of them
    is_alone: bool = False  # whether it was made of one request, which is tried alone
    alone_losses: int = 0  # losses that its only request has met alone


class Suspects:
    """The suspects of one front. Requests and engines have numbers; those of lost engines may be used again."""

    def __init__(self) -> None:
        self._groups: dict[int, SuspectGroup] = {}  # for each suspect, its group
        self._trials: dict[int, SuspectGroup] = {}  # for each engine that has suspects, their group

    def __contains__(self, request: int) -> bool:
        return request in self._groups

    def key(self, request: int) -> str:
        """The name of the suspect's group, for `meeting_engine`."""
        return self._groups[request].key

    def losses(self, request: int) -> int:
        """Number of losses that the request has met since its last token."""
        group = self._groups.get(request)
        return 0 if group is None else group.losses + group.alone_losses

    def engines_for(self, request: int, engines: Iterable[int]) -> list[int]:
        """The engines of `engines` that may get the request now. An empty list: the request waits."""
        group = self._groups.get(request)
        if group is None:
            return [engine for engine in engines if not self._is_closed(engine)]
        if group.engine is not None:
            return [engine for engine in engines if engine == group.engine]
        return [engine for engine in engines if engine not in self._trials]

    def _is_closed(self, engine: int) -> bool:
        group = self._trials.get(engine)
        return group is not None and group.is_alone

    def send(self, request: int, engine: int) -> None:
        """Notes that the request was submitted to one of `engines_for`."""
        if (group := self._groups.get(request)) is not None:
            assert group.engine in (None, engine) and self._trials.get(engine, group) is group
            group.engine = engine
            self._trials[engine] = group

    def clear(self, request: int) -> None:
        """Notes that the request has made a token, or has ended, so it is not a suspect any more."""
        group = self._groups.pop(request, None)
        if group is not None:
            group.requests.discard(request)
            if not group.requests:
                self._leave(group)

    def lose(self, engine: int, loss: str, aboard: Collection[int], is_outside: bool = False) -> list[int]:
        """Notes the loss of an engine. Returns the requests that this loss ends, which are not suspects any more.

        `loss`: a name that all fronts have for it, as the id of the engine's life. `aboard`: the requests that had
        begun there, oldest first. `is_outside`: a cut link or a signal from outside is the cause.
        """
        group = self._trials.pop(engine, None)
        if group is not None:
            group.engine = None
        if is_outside:
            return []
        fresh = [request for request in aboard if request not in self._groups]
        failed = self._part(group, [each for each in aboard if each in group.requests]) if group is not None else []
        if fresh:
            self._enter(SuspectGroup(loss, 1, is_alone=len(fresh) == 1), fresh)
        return failed

    def _part(self, group: SuspectGroup, aboard: list[int]) -> list[int]:
        """The group has met another loss, with these of its requests aboard."""
        if group.is_alone and aboard:
            group.alone_losses += 1
            if group.alone_losses == MAX_ALONE:
                self.clear(aboard[0])
                return aboard
            return []
        if group.losses == 1:
            middle = (len(aboard) + 1) // 2
            parts = [(f"{group.key}/0", aboard[:middle]), (f"{group.key}/1", aboard[middle:])]
        else:
            parts = [(f"{group.key}/{request}", [request]) for request in aboard]
        for key, requests in parts:
            if requests:
                self._enter(SuspectGroup(key, group.losses + 1, is_alone=len(requests) == 1), requests)
        return []

    def _enter(self, group: SuspectGroup, requests: list[int]) -> None:
        for request in requests:
            self.clear(request)
            group.requests.add(request)
            self._groups[request] = group

    def _leave(self, group: SuspectGroup) -> None:
        if group.engine is not None:
            del self._trials[group.engine]
            group.engine = None


def meeting_engine(key: str, engines: Mapping[int, str]) -> int:
    """The engine that all fronts choose for a group without talking to each other: the one whose name and `key` have
    the greatest hash. `engines`: the names of the engines that may be chosen, at least one."""

    def rank(engine: int) -> bytes:
        return blake2b(f"{key}\0{engines[engine]}".encode(), digest_size=8).digest()

    return max(engines, key=rank)
