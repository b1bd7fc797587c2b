"""What an engine tells its fronts about its prefix cache: first all of it, then changes."""

from dataclasses import dataclass

from text_generation_router.fleet.block_hashes import BlockHasher
from text_generation_router.fleet.cached_blocks import CachedBlocks
from text_generation_router.scheduling.memory.observer import CacheObserver

# Most hashes of 8 bytes in one message, which is then smaller than 64 KiB.
MAX_HASHES = 8000


@dataclass(frozen=True, slots=True)
class CacheNews:
    """Changes of the cache, or a part of all that is cached: a Cache message (proto/engine.proto). Its sender numbers
    the messages of a call from 1 on."""

    added: list[int]
    removed: list[int]
    is_snapshot: bool = False


class CacheLog:
    """The changes that are not told yet. A block that was added and removed since is not told at all.

    Its observer is given to a prefix cache before the first `snapshot`, and taken away before
    `end`. In between, a front that begins to
    listen gets `snapshot`, and then each `take`. A change told twice changes nothing: so the
    snapshot may contain changes that the next `take` returns.
    """

    def __init__(self, hasher: BlockHasher) -> None:
        self._blocks = CachedBlocks(hasher, self._add, self._remove)
        self._changes: dict[int, bool] = {}  # for each hash: whether it was added, or removed

    @property
    def observer(self) -> CacheObserver:
        return self._blocks

    def end(self) -> None:
        """Forgets all: the observer is told nothing more, until it is given to a cache again."""
        self._blocks.begin()
        self._changes.clear()

    def take(self) -> list[CacheNews]:
        """The changes since the last call, at most MAX_HASHES in each of the news."""
        changes, self._changes = list(self._changes.items()), {}
        news = []
        for start in range(0, len(changes), MAX_HASHES):
            part = changes[start : start + MAX_HASHES]
            added = [block for block, is_added in part if is_added]
            removed = [block for block, is_added in part if not is_added]
            news.append(CacheNews(added, removed))
        return news

    def snapshot(self) -> list[CacheNews]:
        """All that is cached now, in one or more parts."""
        hashes = list(self._blocks.hashes())
        starts = range(0, max(1, len(hashes)), MAX_HASHES)
        return [CacheNews(hashes[start : start + MAX_HASHES], [], is_snapshot=True) for start in starts]

    def _add(self, hashes: list[int]) -> None:
        changes = self._changes
        for block in hashes:
            if changes.pop(block, True):
                changes[block] = True

    def _remove(self, hashes: list[int]) -> None:
        changes = self._changes
        for block in hashes:
            if not changes.pop(block, False):
                changes[block] = False
