"""Counts the engines that fell silent with a request that made no token there, so that a request that hangs engines is
found.

Silence is a cut link or a stopped process far more often, so one silence makes no suspects. A silence counts only if
the engine was the cause: if another engine sent messages meanwhile, so that the front's own link was not cut, or if the
engine comes back with another life, so that its process was lost. A request that meets MAX_SILENCES in a row without a
token between is a suspect.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

MAX_SILENCES = 2


@dataclass(slots=True, eq=False)
class MetSilences:
    """The silences that one request has met since its last token."""

    count: int = 0
    engines: set[int] = field(default_factory=set)  # engines with such a silence that are not back


@dataclass(frozen=True, slots=True)
class UnsureSilence:
    """An engine that fell silent while no other engine sent messages."""

    life: str
    requests: set[int]  # requests that have not been sent elsewhere since


class Silences:
    def __init__(self) -> None:
        self._met: dict[int, MetSilences] = {}
        self._unsure: dict[int, UnsureSilence] = {}

    def count(self, engine: int, requests: Collection[int]) -> list[int]:
        """Counts a silence against `requests`. Returns those that are suspects from now on."""
        found = []
        for request in requests:
            met = self._met.setdefault(request, MetSilences())
            met.count += 1
            met.engines.add(engine)
            if met.count >= MAX_SILENCES:
                found.append(request)
        return found

    def down(self, request: int) -> set[int]:
        """The engines that the request may have hung and that are not back."""
        return self._met[request].engines if request in self._met else set()

    def note_unsure(self, engine: int, life: str, requests: Collection[int]) -> None:
        """The silence counts if the engine comes back with another life, and `requests` have waited for it."""
        self._unsure[engine] = UnsureSilence(life, set(requests))

    def confirmed(self, engine: int, life: str) -> UnsureSilence | None:
        """The engine is back; an empty life: it will never be. Returns a silence that is to be counted now."""
        unsure = self._unsure.pop(engine, None)
        return unsure if unsure is not None and life not in ("", unsure.life) else None

    def returned(self, engine: int) -> None:
        """Nothing waits for the engine any more."""
        for met in self._met.values():
            met.engines.discard(engine)

    def sent(self, request: int) -> None:
        """The request goes on with an engine."""
        for unsure in self._unsure.values():
            unsure.requests.discard(request)

    def inherit(self, request: int, heir: int) -> None:
        if (met := self._met.get(request)) is not None:
            self._met[heir] = MetSilences(met.count, set(met.engines))

    def forget(self, request: int) -> None:
        """The request has made a token, or has ended."""
        self._met.pop(request, None)
        self.sent(request)
