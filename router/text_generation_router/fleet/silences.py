"""Counts the engines that fell silent with a request that made no token there, so that a request that hangs engines is
found.

Silence is a cut link or a stopped process far more often, so one silence makes no suspects. A request that meets
MAX_SILENCES in a row without a token between is a suspect.

A silence is sure if another engine sent messages meanwhile. Otherwise the front's own link may have been cut: the
silence is unsure, and counts until the engine comes back with the same life.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

MAX_SILENCES = 2


@dataclass(slots=True, eq=False)
class MetSilences:
    """The silences that one request has met since its last token."""

    count: int = 0
    engines: set[int] = field(default_factory=set)  # engines with such a silence that are not back
    unsure: dict[int, str] = field(default_factory=dict)  # engines whose silence is unsure, and their lives then


@dataclass(frozen=True, slots=True)
class UnsureSilence:
    """An unsure silence of an engine that had suspects because of earlier silences."""

    life: str
    requests: set[int]  # suspects that have not been sent elsewhere since


class Silences:
    def __init__(self) -> None:
        self._met: dict[int, MetSilences] = {}
        self._unsure: dict[int, UnsureSilence] = {}

    def count(self, engine: int, life: str, requests: Collection[int], is_sure: bool) -> list[int]:
        """Counts a silence against `requests`. Returns those that are suspects from now on."""
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
        """The silence counts against `suspects` once the engine comes back with another life, if they wait for it."""
        self._unsure[engine] = UnsureSilence(life, set(suspects))

    def returned(self, engine: int, life: str) -> UnsureSilence | None:
        """The engine is back; an empty life: it will never be. Returns an unsure silence that was its own."""
        for met in self._met.values():
            met.engines.discard(engine)
            if met.unsure.pop(engine, None) == life:
                met.count -= 1
        unsure = self._unsure.pop(engine, None)
        return unsure if unsure is not None and life not in ("", unsure.life) else None

    def sent(self, request: int) -> None:
        """The request goes on with an engine."""
        for unsure in self._unsure.values():
            unsure.requests.discard(request)

    def inherit(self, request: int, heir: int) -> None:
        if (met := self._met.get(request)) is not None:
            self._met[heir] = MetSilences(met.count, set(met.engines), dict(met.unsure))

    def forget(self, request: int) -> None:
        """The request has made a token, or has ended."""
        self._met.pop(request, None)
        self.sent(request)
