"""What an engine reports to its fronts about its prefix cache, and how often: first the whole cache, then changes; and
the names for cached tokens that fronts and engines agree on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.memory.observer import CacheObserver
from text_generation_router.scheduling.memory.radix_tree import Node
from text_generation_router.scheduling.request import Namespace

# Milliseconds between two news of an engine: minimum, maximum, and the increase for each engine of the front. A message
# costs a front about 0.1 ms, so reading takes about 1 % of a core, or 0.1 ms for each engine and second.
EVERY_MS, MAX_EVERY_MS, MS_PER_ENGINE = 250, 1000, 10


def next_pace_ms(pace_ms: int, engines: int) -> int:
    """The milliseconds between two news for a front with `engines` engines, which now gets them every `pace_ms`. The
    pace changes in steps, and not with every engine that comes and goes, because a change costs a new call."""
    wanted_ms = min(max(MS_PER_ENGINE * engines, EVERY_MS), MAX_EVERY_MS)
    while pace_ms < wanted_ms:
        pace_ms *= 2
    while pace_ms > max(EVERY_MS, 4 * MS_PER_ENGINE * engines):
        pace_ms //= 2
    return pace_ms


# Names for cached tokens that fronts and engines agree on: a hash for each whole block of BLOCK_TOKENS tokens.
#
# A hash is 8 bytes of keyed BLAKE2b over the hash before it and the block's token ids, as 32-bit integers in
# little-endian order. So a hash stands for all tokens from the first to the end of its block. Before the first block
# comes the hash of the namespace. All processes of a deployment have the same key; without it, a hash says nothing
# about its tokens.

Ids = npt.NDArray[np.int32]

BLOCK_TOKENS = 64
HASH_BYTES = 8
KEY_BYTES = (16, 64)  # minimum, because a shorter key can be guessed; BLAKE2b's maximum

_BLOCK_BYTES = 4 * BLOCK_TOKENS
_NAMESPACE = b"namespace"  # makes the hash of a namespace differ from hashes of blocks


class BlockHasher:
    """Makes the hashes of one deployment. ValueError: `key` is too short or too long."""

    def __init__(self, key: bytes) -> None:
        fewest, most = KEY_BYTES
        if not fewest <= len(key) <= most:
            raise ValueError(f"a key of {len(key)} bytes for hashes of blocks: give it {fewest} to {most}")
        self._key = key
        self._empty = blake2b(digest_size=HASH_BYTES, key=key)  # BLAKE2b after its key; copied for each block

    def root(self, namespace: Namespace) -> int:
        """The hash before the first block."""
        digest = blake2b(digest_size=HASH_BYTES, key=self._key, person=_NAMESPACE)
        for part in namespace:
            text = part.encode("utf-8", "surrogatepass")
            digest.update(len(text).to_bytes(8, "little") + text)
        return int.from_bytes(digest.digest(), "little")

    def blocks(self, before: int, ids: Ids) -> list[int]:
        """The hashes of the whole blocks of `ids`, which follow the block or root whose hash is `before`."""
        data = ids.astype("<i4", copy=False).tobytes()
        digest, digests = before.to_bytes(HASH_BYTES, "little"), []
        copy = self._empty.copy
        for start in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            state = copy()
            state.update(digest + data[start : start + _BLOCK_BYTES])
            digest = state.digest()
            digests.append(digest)
        hashes: list[int] = np.frombuffer(b"".join(digests), "<u8").tolist()
        return hashes


class HistoryHashes:
    """The hashes of one request's tokens, prompt and output. The history only grows."""

    __slots__ = ("_hasher", "_root", "hashes")

    def __init__(self, hasher: BlockHasher, namespace: Namespace, ids: Sequence[int] | Ids = ()) -> None:
        self.hashes: list[int] = []
        self._hasher = hasher
        self._root = hasher.root(namespace)
        self.grow(ids)

    def grow(self, history: Sequence[int] | Ids) -> None:
        """Hashes the blocks that are new in `history`, which begins with all tokens given before."""
        known = len(self.hashes) * BLOCK_TOKENS
        if len(history) >= known + BLOCK_TOKENS:
            new = np.asarray(history[known:], dtype=np.int32)
            self.hashes += self._hasher.blocks(self.hashes[-1] if self.hashes else self._root, new)


# The engine's half of the cache's news: turns changes of the prefix cache into hashes of whole blocks.


@dataclass(slots=True)
class NodeBlocks:
    """The blocks that end within a node."""

    start: int  # number of tokens before the node
    hashes: list[int] = field(default_factory=list)


class CachedBlocks:
    """An observer of the prefix cache. Calls `added` with the hashes of blocks that are cached from now on, blocks that
    come first in a text first, and `removed` with hashes of blocks that are not cached any more.

    Namespaces are tuples of texts. An observer begins with an empty cache.
    """

    def __init__(
        self, hasher: BlockHasher, on_added: Callable[[list[int]], None], on_removed: Callable[[list[int]], None]
    ) -> None:
        self._hasher = hasher
        self._on_added, self._on_removed = on_added, on_removed
        # Roots have no entry. Other nodes without an entry are detached or below a detached node, so no search finds
        # them.
        self._of: dict[Node, NodeBlocks] = {}

    def hashes(self) -> Iterator[int]:
        """The hashes of all blocks, in no order."""
        for blocks in self._of.values():
            yield from blocks.hashes

    def begin(self) -> None:
        removed = list(self.hashes())
        self._of.clear()
        if removed:
            self._on_removed(removed)

    def added(self, node: Node, count: int) -> None:
        blocks = self._of.get(node) or self._enter(node)
        if blocks is None:
            return
        end = blocks.start + len(node)
        whole = (end - count) // BLOCK_TOKENS * BLOCK_TOKENS  # number of tokens whose blocks are hashed already
        if end - whole >= BLOCK_TOKENS:
            new = self._hasher.blocks(self._hash_before(node), self._ids_from(node, blocks, whole))
            blocks.hashes += new
            self._on_added(new)

    def split(self, upper: Node, lower: Node) -> None:
        if (blocks := self._of.get(lower)) is None:
            return
        end = blocks.start + len(upper)
        count = end // BLOCK_TOKENS - blocks.start // BLOCK_TOKENS
        self._of[upper] = NodeBlocks(blocks.start, blocks.hashes[:count])
        blocks.start, blocks.hashes = end, blocks.hashes[count:]

    def cut(self, leaf: Node, kept: int) -> None:
        if (blocks := self._of.get(leaf)) is None:
            return
        count = (blocks.start + kept) // BLOCK_TOKENS - blocks.start // BLOCK_TOKENS
        removed = blocks.hashes[count:]
        if kept:
            del blocks.hashes[count:]
        else:
            del self._of[leaf]
        if removed:
            self._on_removed(removed)

    def detached(self, top: Node) -> None:
        below, removed = [top], list[int]()
        for node in below:
            if (blocks := self._of.pop(node, None)) is not None:
                removed += blocks.hashes
                below.extend(node.children.values())
        if removed:
            self._on_removed(removed)

    def _enter(self, node: Node) -> NodeBlocks | None:
        """The entry of a new node. None: no search finds the node."""
        parent = node.parent
        assert parent is not None, "a root has no tokens"
        if node.is_detached:
            return None
        if parent.parent is None:
            start = 0
        elif (above := self._of.get(parent)) is not None:
            start = above.start + len(parent)
        else:
            return None
        blocks = self._of[node] = NodeBlocks(start)
        return blocks

    def _hash_before(self, node: Node) -> int:
        """The hash of the last block known on the path to the end of `node`, or the hash of the namespace."""
        for held in node.path():
            if (blocks := self._of.get(held)) is not None and blocks.hashes:
                return blocks.hashes[-1]
        assert isinstance(held.namespace, tuple)
        return self._hasher.root(held.namespace)

    def _ids_from(self, node: Node, blocks: NodeBlocks, start: int) -> Ids:
        """The token ids from position `start` to the end of `node`."""
        runs, missing, above = [node.ids[max(0, start - blocks.start) :]], blocks.start - start, node.parent
        while missing > 0 and above is not None:
            runs.append(above.ids[-missing:])
            missing -= len(runs[-1])
            above = above.parent
        return np.concatenate(runs[::-1])


# Maximum number of hashes of 8 bytes in one message, which is then smaller than 64 KiB.
MAX_HASHES = 8000


@dataclass(frozen=True, slots=True)
class CacheNews:
    """A Cache message (proto/engine.proto): changes of the cache, or a part of its whole content. The sender numbers
    the messages of a call from 1 on."""

    added: list[int]
    removed: list[int]
    is_snapshot: bool = False


class CacheLog:
    """The changes that are not reported yet. A block that was added and removed meanwhile is not reported at all.

    Its observer is given to a prefix cache before the first `snapshot`, and taken away before `end`. In between, a
    front that begins to listen gets `snapshot`, and then each `take`. A change that is reported twice has no effect the
    second time, so the snapshot may contain changes that the next `take` returns.
    """

    def __init__(self, hasher: BlockHasher) -> None:
        self._blocks = CachedBlocks(hasher, self._add, self._remove)
        self._changes: dict[int, bool] = {}  # for each hash: True if its block was added, False if removed

    @property
    def observer(self) -> CacheObserver:
        return self._blocks

    def end(self) -> None:
        """Forgets all changes and blocks, because the observer is taken away from its cache."""
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
        """All hashes of blocks that are cached now, in one or more parts."""
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
