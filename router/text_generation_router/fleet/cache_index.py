"""Which engines have which blocks in their caches, as one front knows from their news.

Engines have small numbers, and a set of engines is an int with a bit for each. An engine never caches a block without
the blocks before it, so the engines that have the first n blocks are the engines that have the n-th block.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from text_generation_router.fleet.cache_news import CacheNews

Counts = npt.NDArray[np.int64]

# Maximum number of blocks of a prompt that are looked up to compare engines. So the search takes the same time for
# prompts of any length, and an engine's part of a prompt is known to about 3 %.
MAX_LOOKS = 32


@dataclass(slots=True)
class KnownCache:
    """The blocks of one engine's cache that its news have reported."""

    bit: int  # the set of this engine alone: one int object for all its blocks
    max_blocks: int
    sequence: int = 0  # number of the last news taken; 0: a snapshot has to come first
    num_blocks: int = 0
    # Hashes of all blocks, and perhaps of blocks that were removed since.
    hashes: "array[int]" = field(default_factory=lambda: array("Q"))
    # Hashes of the blocks that requests sent to the engine will add to its cache. Each has the time, in seconds, until
    # which the engine's report of the block is awaited.
    expected: dict[int, float] = field(default_factory=dict)


class CacheIndex:
    """Which engines have which blocks. `num_engines`: the engines' numbers are below this."""

    def __init__(self, num_engines: int) -> None:
        self.num_engines = num_engines
        self.num_ignored = 0  # number of blocks that were reported beyond an engine's `max_blocks`
        self._engines: dict[int, int] = {}  # for each block, the set of engines that have it
        self._known: dict[int, KnownCache] = {}
        self._width = 0  # engines that joined have numbers below this

    def join(self, engine: int, max_blocks: int) -> None:
        """Adds an engine, without blocks. At most `max_blocks` of its blocks are remembered."""
        assert 0 <= engine < self.num_engines
        self.leave(engine)
        self._width = max(self._width, engine + 1)
        self._known[engine] = KnownCache(1 << engine, max_blocks)

    def leave(self, engine: int) -> None:
        """Forgets an engine and its blocks."""
        if (known := self._known.pop(engine, None)) is not None:
            self._clear(known)

    def __len__(self) -> int:
        """Number of different blocks that are known."""
        return len(self._engines)

    def num_blocks(self, engine: int) -> int:
        return self._known[engine].num_blocks

    def take(self, engine: int, sequence: int, news: CacheNews) -> bool:
        """Takes message `sequence` of a News call. Message 1 replaces what was known of the engine. False: earlier
        messages are missing, so the front has to call again, and the engine then reports its whole cache."""
        known = self._known[engine]
        if sequence == 1 and news.is_snapshot:
            self._clear(known)
        elif sequence != known.sequence + 1 or sequence == 1:
            return False
        known.sequence = sequence
        self._remove(known, news.removed)
        self._add(known, news.added)
        return True

    def expect(self, engine: int, hashes: Sequence[int], until_s: float) -> None:
        """Counts the blocks of a request that was sent to the engine as cached there, until the engine reports them or
        `until_s` has passed (see `forget_expected`)."""
        known = self._known[engine]
        for block in hashes:
            if block in known.expected or not self._engines.get(block, 0) & known.bit:
                known.expected[block] = until_s
        self._add_bits(known, hashes)

    def forget_expected(self, engine: int, now_s: float) -> None:
        """Forgets the expected blocks that the engine has not reported in time."""
        known = self._known[engine]
        if known.expected:
            self._remove(known, [block for block, until_s in known.expected.items() if until_s <= now_s])

    def matched(self, hashes: Sequence[int]) -> Counts:
        """For each engine, how many of the first blocks of a prompt its cache has. Of a prompt with more than MAX_LOOKS
        blocks, only every nth block is looked for, and the number is rounded down to a multiple of n, or is all blocks.
        """
        sets, ends = self._running_sets(hashes)
        if not sets:
            return np.zeros(self._width, dtype=np.int64)
        size = -(-self._width // 8)
        flags = b"".join([engines.to_bytes(size, "little") for engines in sets])
        flags_SB = np.frombuffer(flags, dtype=np.uint8).reshape(len(sets), size)
        is_in_SE = np.unpackbits(flags_SB, axis=1, count=self._width, bitorder="little")
        num_sets_E = np.add.reduce(is_in_SE, axis=0, dtype=np.uint8)
        matched_E: Counts = np.array(ends, dtype=np.int64)[num_sets_E]
        return matched_E

    def _running_sets(self, hashes: Sequence[int]) -> tuple[list[int], list[int]]:
        """The engines that have the first blocks: the first set has all of these engines, and each other set a part of
        the set before. `ends`: an engine that is in n of the sets has `ends[n]` blocks."""
        find, having = self._engines.get, -1
        sets, ends = list[int](), [0]
        for end in _looks(len(hashes)):
            now = find(hashes[end - 1], 0) & having
            if now == having:
                ends[-1] = end
            elif not now:
                break
            else:
                sets.append(now)
                ends.append(end)
                having = now
        return sets, ends

    def matched_by(self, engine: int, hashes: Sequence[int]) -> int:
        """How many of the first blocks of a prompt one engine has."""
        find, bit = self._engines.get, 1 << engine
        return bisect_left(hashes, 1, key=lambda block: not find(block, 0) & bit)

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


def _looks(blocks: int) -> Sequence[int]:
    """Lengths in blocks of the beginnings of a prompt that are looked for, rising; the last length is the whole
    prompt."""
    if blocks <= MAX_LOOKS:
        return range(1, blocks + 1)
    step = -(-blocks // MAX_LOOKS)
    return [*range(step, blocks, step), blocks]
