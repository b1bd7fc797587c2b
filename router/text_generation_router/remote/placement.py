"""Which engine gets a group of requests."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from text_generation_router.remote.requests import RemoteGroup
from text_generation_router.remote.values import ToldLoad
from text_generation_router.replicas.choice import EngineChoice

# Most engines of a deployment.
MOST_ENGINES = 1024
NO_BLOCKS = np.zeros(0, dtype=np.int64)


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


class LeastLoad:
    """Implements Placement: the engine with the fewest tokens to compute and rows, by its own word and by what this
    front has sent since. What engines have in their caches does not count.

    `turn`: see `EngineChoice`."""

    def __init__(self, turn: int = 0) -> None:
        self._choice = EngineChoice(MOST_ENGINES, turn)

    def told(self, engine: int, told: ToldLoad, newest_index: int) -> None:
        self._choice.tell(engine, told.load, newest_index)

    def sent(self, engine: int, group: RemoteGroup) -> None:
        self._choice.send(engine, group.wire_indexes[-1], group.num_uncomputed, len(group.members))

    def lost(self, engine: int) -> None:
        self._choice.lose(engine)

    def choose(self, group: RemoteGroup, engines: Sequence[int]) -> int:
        without = set(self._choice.open).difference(engines)
        chosen = self._choice.choose(NO_BLOCKS, 0, without)
        return chosen if chosen is not None else engines[0]  # no engine has shards now
