"""Which engine gets a group of requests: the ways to choose among several engines, by load, by turns, or by what an
engine's cache has of the prompt; and how a policy is made.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from text_generation_router.fleet.cache_index import CacheIndex
from text_generation_router.fleet.cache_news import BLOCK_TOKENS, BlockHasher, CacheNews, HistoryHashes
from text_generation_router.fleet.choice import MAX_ENGINES, EngineChoice, PlacementPolicy
from text_generation_router.fleet.requests import RemoteGroup
from text_generation_router.fleet.values import LoadReport

NO_BLOCKS = np.zeros(0, dtype=np.int64)


class Placement(ABC):
    """Chooses among engines, which have numbers. Its methods are called for each report and each Submit of an
    engine."""

    wants_cache = False  # whether engines are to report changes of their caches
    num_cached_blocks = 0  # number of different blocks that engines are known to have

    @abstractmethod
    def joined(self, engine: int, capacity: int, num_open: Callable[[], int]) -> None:
        """Notes that an engine with `capacity` token slots is connected. `num_open` returns the number of this front's
        requests on the engine."""

    @abstractmethod
    def reported(self, engine: int, report: LoadReport, newest_index: int, now: float) -> None:
        """Notes that an engine has reported its load. `newest_index`: greatest index of the front's requests that the
        engine had answered."""

    def cached(self, engine: int, sequence: int, news: CacheNews) -> bool:
        """Notes that an engine has reported changes of its cache. False: earlier changes are missing, so the News call
        has to be made again."""
        return True

    @abstractmethod
    def sent(self, engine: int, group: RemoteGroup) -> None:
        """Notes that the group was submitted to the engine."""

    @abstractmethod
    def lost(self, engine: int) -> None: ...

    @abstractmethod
    def choose(self, group: RemoteGroup, engines: Sequence[int]) -> int:
        """Chooses one of `engines`, of which there are at least two."""
        ...


class LeastLoad(Placement):
    """Chooses the engine with the smallest load, that is, tokens to compute and rows: the load of its last report, plus
    the load that this front has sent since. Cached blocks do not count.

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
    """Chooses the engine with the fewest unfinished requests of this front; of several such engines, the next in turn.
    For comparison with load balancers, which choose so."""

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
    """Chooses one engine after the other, whatever their loads. For comparison with load balancers, which choose so."""

    def __init__(self, turn: int = 0) -> None:
        self._turn = turn

    def joined(self, engine: int, capacity: int, num_open: Callable[[], int]) -> None: ...

    def reported(self, engine: int, report: LoadReport, newest_index: int, now: float) -> None: ...

    def sent(self, engine: int, group: RemoteGroup) -> None: ...

    def lost(self, engine: int) -> None: ...

    def choose(self, group: RemoteGroup, engines: Sequence[int]) -> int:
        self._turn = min(engines, key=lambda engine: (engine - self._turn - 1) % MAX_ENGINES)
        return self._turn


# The choice of an engine by what its cache has of a prompt and by its load, and how a policy is made.

# Seconds for which the blocks of a request that was sent count as cached, unless the engine reports them before.
EXPECTED_S = 10.0
# Number of blocks remembered of an engine for each block that fits into its token slots. A cache may have more blocks
# than fit into the slots: two texts that first differ within a block share slots, but not the hash of that block.
BLOCKS_PER_BLOCK = 2


class BestScore(Placement):
    """Chooses the engine with the best score (`fleet/choice.py`). With fewer than two engines nothing is hashed, and no
    engine is asked for news of its cache.

    `turn`: see `EngineChoice`."""

    def __init__(self, key: bytes, turn: int = 0) -> None:
        self.index = CacheIndex(MAX_ENGINES)
        self._choice = EngineChoice(MAX_ENGINES, turn)
        self._hasher = BlockHasher(key)
        self._engines: set[int] = set()
        self._hashed: tuple[RemoteGroup | None, list[int]] = None, []  # the newest group that was hashed

    @property
    def wants_cache(self) -> bool:  # type: ignore[override]
        return len(self._engines) > 1

    @property
    def num_cached_blocks(self) -> int:  # type: ignore[override]
        return len(self.index)

    def joined(self, engine: int, capacity: int, num_open: Callable[[], int]) -> None:
        self._engines.add(engine)
        self.index.join(engine, BLOCKS_PER_BLOCK * capacity // BLOCK_TOKENS)

    def reported(self, engine: int, report: LoadReport, newest_index: int, now: float) -> None:
        self._choice.take_report(engine, report.load, newest_index)
        self.index.forget_expected(engine, now)

    def cached(self, engine: int, sequence: int, news: CacheNews) -> bool:
        return self.index.take(engine, sequence, news)

    def sent(self, engine: int, group: RemoteGroup) -> None:
        tokens = group.num_uncomputed
        if self.wants_cache:
            hashes = self._hashes_of(group)
            tokens -= BLOCK_TOKENS * self.index.matched_by(engine, hashes)
            self.index.expect(engine, hashes, group.submitted_s + EXPECTED_S)
        self._choice.send(engine, group.wire_indexes[-1], tokens, len(group.members))

    def lost(self, engine: int) -> None:
        self._engines.discard(engine)
        self.index.leave(engine)
        self._choice.lose(engine)

    def choose(self, group: RemoteGroup, engines: Sequence[int]) -> int:
        hashes = self._hashes_of(group)
        chosen = self._choice.choose(self.index.matched(hashes), len(hashes), sorted(engines))
        return chosen if chosen is not None else engines[0]  # no engine has shards now

    def _hashes_of(self, group: RemoteGroup) -> list[int]:
        """The hashes of what the engine will compute for the group: its prompt, with the output of a single member."""
        if self._hashed[0] is not group:
            ids, members = group.request.input_ids, list(group.members.values())
            if len(members) == 1:
                ids = (*ids, *members[0].output_ids)
            self._hashed = group, HistoryHashes(self._hasher, group.request.namespace, ids).hashes
        return self._hashed[1]


def placement_of(policy: PlacementPolicy, key: bytes | None, turn: int) -> Placement:
    """`key`: key of the block hashes. Without a key engines report nothing about their caches, and the load alone
    decides."""
    if policy is PlacementPolicy.SCORE and key is not None:
        return BestScore(key, turn)
    if policy is PlacementPolicy.LEAST_REQUESTS:
        return LeastRequests(turn)
    return RoundRobin(turn) if policy is PlacementPolicy.ROUND_ROBIN else LeastLoad(turn)
