"""A front's knowledge of what is cached where: for each block, the engines that have it.

Engines have small numbers, and a set of engines is an int with a bit for each. An engine never caches a block without
the blocks before it, so a search halves the prompt instead of looking up every block.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from text_generation_router.replicas.cache_news import CacheNews

Counts = npt.NDArray[np.int64]


@dataclass(slots=True)
class KnownCache:
    """What is known of one engine's cache."""

    bit: int  # the set of this engine alone; one object, which all its blocks share
    max_blocks: int
    sequence: int = 0  # number of the last news taken; 0: a snapshot has to come first
    num_blocks: int = 0
    # Hashes of all blocks, and perhaps of blocks that were removed since.
    hashes: "array[int]" = field(default_factory=lambda: array("Q"))
    # Blocks that a request sent there will add, and until when the engine's word for them is awaited.
    expected: dict[int, float] = field(default_factory=dict)


class CacheIndex:
    """Which engines have which blocks. `num_engines`: the engines' numbers are below this."""

    def __init__(self, num_engines: int) -> None:
        self.num_engines = num_engines
        self.num_ignored = 0  # number of blocks that were told beyond an engine's `max_blocks`
        self._engines: dict[int, int] = {}  # for each block, the set of engines that have it
        self._known: dict[int, KnownCache] = {}
        self._bytes = -(-num_engines // 8)

    def join(self, engine: int, max_blocks: int) -> None:
        """Knows an engine from now on. At most `max_blocks` of its blocks are remembered."""
        assert 0 <= engine < self.num_engines
        self.leave(engine)
        self._known[engine] = KnownCache(1 << engine, max_blocks)

    def leave(self, engine: int) -> None:
        """Forgets an engine and its blocks."""
        if (known := self._known.pop(engine, None)) is not None:
            self._clear(known)

    def num_blocks(self, engine: int) -> int:
        return self._known[engine].num_blocks

    def listen(self, engine: int) -> None:
        """A new call for the engine's news begins. What was known stays until its first message."""
        self._known[engine].sequence = 0

    def take(self, engine: int, sequence: int, news: CacheNews) -> bool:
        """Takes message `sequence` of a call; the first one has number 1. False: messages are missing before this one,
        so the call has to be opened again, for the engine to tell all that is cached."""
        known = self._known[engine]
        if sequence != known.sequence + 1 or (sequence == 1 and not news.is_snapshot):
            return False
        if sequence == 1:
            self._clear(known)
        known.sequence = sequence
        self._remove(known, news.removed)
        self._add(known, news.added)
        return True

    def expect(self, engine: int, hashes: Sequence[int], until_s: float) -> None:
        """Counts the blocks of a request that was sent to the engine as cached there, until the engine tells of them or
        `until_s` has passed (see `forget_expected`)."""
        known = self._known[engine]
        for block in hashes:
            if block in known.expected or not self._engines.get(block, 0) & known.bit:
                known.expected[block] = until_s
        self._add_bits(known, hashes)

    def forget_expected(self, now_s: float) -> None:
        """Forgets the expected blocks of which no engine has told in time."""
        for known in self._known.values():
            late = [block for block, until_s in known.expected.items() if until_s <= now_s]
            self._remove(known, late)

    def matched(self, hashes: Sequence[int]) -> Counts:
        """For each engine, how many of the first blocks of a prompt it has."""
        groups = self._groups(hashes)
        if not groups:
            return np.zeros(self.num_engines, dtype=np.int64)
        flags = b"".join([engines.to_bytes(self._bytes, "little") for engines, _ in groups])
        flags_GB = np.frombuffer(flags, dtype=np.uint8).reshape(len(groups), self._bytes)
        is_in_GE = np.unpackbits(flags_GB, axis=1, count=self.num_engines, bitorder="little")
        counts_G = np.array([count for _, count in groups], dtype=np.int64)
        matched_E: Counts = counts_G @ is_in_GE
        return matched_E

    def _groups(self, hashes: Sequence[int]) -> list[tuple[int, int]]:
        """Disjoint sets of engines, and how many of the first blocks each of their engines has."""
        find = self._engines.get
        # Parts of the prompt in which the number of engines falls: first block, engines that have it, the block after
        # the part, and engines that have that one.
        parts = [(0, find(hashes[0], 0), len(hashes), 0)] if hashes else []
        groups = []
        while parts:
            first, having, end, having_end = parts.pop()
            if having == having_end:
                continue
            if end - first == 1:
                groups.append((having & ~having_end, end))
                continue
            middle = (first + end) // 2
            having_middle = find(hashes[middle], 0) & having | having_end
            parts += ((first, having, middle, having_middle), (middle, having_middle, end, having_end))
        return groups

    def _add(self, known: KnownCache, hashes: Sequence[int]) -> None:
        if known.expected:
            for block in hashes:
                known.expected.pop(block, None)
        self._add_bits(known, hashes)

    def _add_bits(self, known: KnownCache, hashes: Sequence[int]) -> None:
        index, bit, remember = self._engines, known.bit, known.hashes.append
        count, most = known.num_blocks, known.max_blocks
        for block in hashes:
            having = index.get(block, 0)
            if having & bit:
                continue
            if count == most:
                self.num_ignored += 1
                continue
            count += 1
            index[block] = having | bit if having else bit  # one int object for all blocks of this engine alone
            remember(block)
        known.num_blocks = count

    def _remove(self, known: KnownCache, hashes: Sequence[int]) -> None:
        for block in hashes:
            known.expected.pop(block, None)
        known.num_blocks -= self._remove_bits(known.bit, hashes)
        if len(known.hashes) > 2 * known.num_blocks + 64:
            find, bit = self._engines.get, known.bit
            known.hashes = array("Q", {block for block in known.hashes if find(block, 0) & bit})

    def _remove_bits(self, bit: int, hashes: Sequence[int]) -> int:
        index, count = self._engines, 0
        for block in hashes:
            having = index.get(block, 0)
            if having & bit:
                count += 1
                if having == bit:
                    del index[block]
                else:
                    index[block] = having ^ bit
        return count

    def _clear(self, known: KnownCache) -> None:
        self._remove_bits(known.bit, known.hashes)
        known.hashes, known.num_blocks, known.expected = array("Q"), 0, {}
