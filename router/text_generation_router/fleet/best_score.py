"""The choice of an engine by what its cache has of a prompt and by its load, and how a policy is made."""

from collections.abc import Callable, Sequence

from text_generation_router.fleet.cache_index import CacheIndex
from text_generation_router.fleet.cache_news import BLOCK_TOKENS, BlockHasher, CacheNews, HistoryHashes
from text_generation_router.fleet.choice import MAX_ENGINES, EngineChoice, PlacementPolicy
from text_generation_router.fleet.placement import (
    LeastLoad,
    LeastRequests,
    Placement,
    RoundRobin,
)
from text_generation_router.fleet.requests import RemoteGroup
from text_generation_router.fleet.values import LoadReport

# Seconds for which the blocks of a request that was sent count as cached, unless the engine reports them before.
EXPECTED_S = 10.0
# Blocks that are remembered of an engine, for each block that fits into its token slots: texts that part within a block
# share slots, but not that block.
BLOCKS_PER_BLOCK = 2


class BestScore(Placement):
    """The engine with the best score (`fleet/choice.py`). With fewer than two engines nothing is hashed, and no
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
    """`key`: that of the block hashes. Without a key engines report nothing about their caches, and the load alone
    decides."""
    if policy is PlacementPolicy.SCORE and key is not None:
        return BestScore(key, turn)
    if policy is PlacementPolicy.LEAST_REQUESTS:
        return LeastRequests(turn)
    return RoundRobin(turn) if policy is PlacementPolicy.ROUND_ROBIN else LeastLoad(turn)
