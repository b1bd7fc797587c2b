"""Which engine gets a group of requests: the ways to choose among several engines."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from text_generation_router.fleet.cache_news import CacheNews
from text_generation_router.fleet.choice import MAX_ENGINES, EngineChoice
from text_generation_router.fleet.requests import RemoteGroup
from text_generation_router.fleet.values import LoadReport

NO_BLOCKS = np.zeros(0, dtype=np.int64)


class Placement(ABC):
    """Chooses among engines, which have numbers. Its methods are called for each report and each Submit of an
    engine."""

    wants_cache = False  # whether engines are to report changes of their caches
    num_cached_blocks = 0  # number of different blocks that they are known to have

    @abstractmethod
    def joined(self, engine: int, capacity: int, num_open: Callable[[], int]) -> None:
        """An engine with `capacity` token slots is connected. `num_open` returns how many requests of this front it
        has."""

    @abstractmethod
    def reported(self, engine: int, report: LoadReport, newest_index: int, now: float) -> None:
        """An engine has reported its load. `newest_index`: greatest index of the front's requests that it had
        answered."""

    def cached(self, engine: int, sequence: int, news: CacheNews) -> bool:
        """An engine has reported changes of its cache. False: earlier changes are missing, so the call has to be made
        again."""
        return True

    @abstractmethod
    def sent(self, engine: int, group: RemoteGroup) -> None:
        """The group was submitted."""

    @abstractmethod
    def lost(self, engine: int) -> None: ...

    @abstractmethod
    def choose(self, group: RemoteGroup, engines: Sequence[int]) -> int:
        """One of `engines`, which are two or more."""
        ...


class LeastLoad(Placement):
    """The engine with the smallest load, of tokens to compute and rows: as reported, with what this front has sent
    since. What engines have in their caches does not count.

    `turn`: see `EngineChoice`."""

    def __init__(self, turn: int = 0) -> None:
        self._choice = EngineChoice(MAX_ENGINES, turn)

    def joined(self, engine: int, capacity: int, num_open: Callable[[], int]) -> None: ...

    def reported(self, engine: int, report: LoadReport, newest_index: int, now: float) -> None:
        self._choice.take_report(engine, report.load, newest_index)

    def sent(self, engine: int, group: RemoteGroup) -> None:
        self._choice.send(engine, group.wire_indexes[-1], group.num_uncomputed, len(group.members))

    def lost(self, engine: int) -> None:
        self._choice.lose(engine)

    def choose(self, group: RemoteGroup, engines: Sequence[int]) -> int:
        chosen = self._choice.choose(NO_BLOCKS, 0, sorted(engines))
        return chosen if chosen is not None else engines[0]  # no engine has shards now


class LeastRequests(Placement):
    """The engine with the fewest unfinished requests of this front; of equal ones the next in turn. For comparison:
    load balancers do this."""

    def __init__(self, turn: int = 0) -> None:
        self._turn = turn
        self._num_open: dict[int, Callable[[], int]] = {}

    def joined(self, engine: int, capacity: int, num_open: Callable[[], int]) -> None:
        self._num_open[engine] = num_open

    def reported(self, engine: int, report: LoadReport, newest_index: int, now: float) -> None: ...

    def sent(self, engine: int, group: RemoteGroup) -> None: ...

    def lost(self, engine: int) -> None:
        del self._num_open[engine]

    def choose(self, group: RemoteGroup, engines: Sequence[int]) -> int:
        self._turn = min(
            engines, key=lambda engine: (self._num_open[engine](), (engine - self._turn - 1) % MAX_ENGINES)
        )
        return self._turn


class RoundRobin(Placement):
    """One engine after the other, whatever their loads. For comparison: load balancers do this."""

    def __init__(self, turn: int = 0) -> None:
        self._turn = turn

    def joined(self, engine: int, capacity: int, num_open: Callable[[], int]) -> None: ...

    def reported(self, engine: int, report: LoadReport, newest_index: int, now: float) -> None: ...

    def sent(self, engine: int, group: RemoteGroup) -> None: ...

    def lost(self, engine: int) -> None: ...

    def choose(self, group: RemoteGroup, engines: Sequence[int]) -> int:
        self._turn = min(engines, key=lambda engine: (engine - self._turn - 1) % MAX_ENGINES)
        return self._turn
