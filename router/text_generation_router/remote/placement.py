"""Which engine gets a group of requests."""

from collections.abc import Sequence
from typing import Protocol

from text_generation_router.remote.requests import RemoteGroup
from text_generation_router.remote.values import ToldLoad


class Placement(Protocol):
    """Chooses among engines, which have numbers. It is told of each engine's loads and of all that is sent to it."""

    def told(self, engine: int, told: ToldLoad, newest_index: int) -> None:
        """An engine has told its load. `newest_index`: greatest index of the front's requests that it had answered."""

    def sent(self, engine: int, group: RemoteGroup) -> None:
        """The group was submitted."""

    def lost(self, engine: int) -> None: ...

    def choose(self, group: RemoteGroup, engines: Sequence[int]) -> int:
        """One of `engines`, which are one or more."""
        ...


class FewestRequests:
    """Implements Placement: the engine with the fewest requests, by its own word and what was sent since."""

    def __init__(self) -> None:
        self._told: dict[int, int] = {}
        self._sent: dict[int, list[tuple[int, int]]] = {}  # first index and number of requests of each group

    def told(self, engine: int, told: ToldLoad, newest_index: int) -> None:
        self._told[engine] = told.load.running + told.waiting
        self._sent[engine] = [sent for sent in self._sent.get(engine, ()) if sent[0] > newest_index]

    def sent(self, engine: int, group: RemoteGroup) -> None:
        self._sent.setdefault(engine, []).append((group.wire_indexes[0], len(group.wire_indexes)))

    def lost(self, engine: int) -> None:
        self._told.pop(engine, None)
        self._sent.pop(engine, None)

    def choose(self, group: RemoteGroup, engines: Sequence[int]) -> int:
        return min(engines, key=self._requests)

    def _requests(self, engine: int) -> int:
        return self._told.get(engine, 0) + sum(count for _, count in self._sent.get(engine, ()))
