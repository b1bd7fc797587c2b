"""Counts, for each request, the engines that fell silent while they had the request and had made no token of it, so
that a request that hangs engines is found. An engine is silent if it sends no message.

The usual cause of a silence is a cut link or a stopped process, so a first silence makes no suspects. A request that
meets MAX_SILENCES silences in a row, without a token in between, is a suspect.

A silence is sure if another engine sent messages meanwhile. Otherwise the front's own link may have been cut: the
silence is unsure, and counts until the engine comes back as the same process. `life`: the `engine_id` of a process.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

MAX_SILENCES = 2


@dataclass(slots=True, eq=False)
class MetSilences:
    """The silences that one request has met since its last token."""

    count: int = 0
    engines: set[int] = field(default_factory=set)  # silent engines that had the request and are not back
    unsure: dict[int, str] = field(default_factory=dict)  # engines with an unsure silence: the `engine_id` at that time


@dataclass(frozen=True, slots=True)
class UnsureSilence:
    """An unsure silence of an engine that had suspects because of earlier silences."""

    life: str
    requests: set[int]  # suspects that were not submitted to another engine since


class Silences:
    def __init__(self) -> None:
        self._met: dict[int, MetSilences] = {}
        self._unsure: dict[int, UnsureSilence] = {}

    def count(self, engine: int, life: str, requests: Collection[int], is_sure: bool) -> list[int]:
        """Counts a silence against `requests`. Returns the requests that become suspects."""
        found = []
        for request in requests:
            met = self._met.setdefault(request, MetSilences())
            met.count += 1
            met.engines.add(engine)
            met.unsure.pop(engine, None)
            if not is_sure:
                met.unsure[engine] = life
            if met.count >= MAX_SILENCES:
                found.append(request)
        return found

    def down(self, request: int) -> set[int]:
        """The engines that the request may have hung and that are not back."""
        return self._met[request].engines if request in self._met else set()

    def note_unsure(self, engine: int, life: str, suspects: Collection[int]) -> None:
        """Lets the silence count against `suspects` if the engine that they wait for comes back as another process."""
        self._unsure[engine] = UnsureSilence(life, set(suspects))

    def returned(self, engine: int, life: str) -> UnsureSilence | None:
        """Notes that the engine is back; an empty `life`: the engine will never be back. Returns its unsure silence if
        the engine is another process now, so that the silence was the engine's own."""
        for met in self._met.values():
            met.engines.discard(engine)
            if met.unsure.pop(engine, None) == life:
                met.count -= 1
        unsure = self._unsure.pop(engine, None)
        return unsure if unsure is not None and life not in ("", unsure.life) else None

    def sent(self, request: int) -> None:
        """Notes that the request was submitted to an engine, so that it no longer waits for the return of another
        engine."""
        for unsure in self._unsure.values():
            unsure.requests.discard(request)

    def inherit(self, request: int, heir: int) -> None:
        if (met := self._met.get(request)) is not None:
            self._met[heir] = MetSilences(met.count, set(met.engines), dict(met.unsure))

    def forget(self, request: int) -> None:
        """Notes that the request has made a token, or has ended."""
        self._met.pop(request, None)
        self.sent(request)
