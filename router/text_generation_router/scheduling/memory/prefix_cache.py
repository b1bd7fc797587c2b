"""The prefix cache: finds slots whose keys and values are computed already, by token ids.

The caller adds only tokens that an answered step has confirmed. Tokens that no request holds count as free memory: when
slots are needed, they are evicted, least recently used first.
"""

import heapq
from collections.abc import Hashable, Iterator

import numpy as np

from text_generation_router.scheduling.memory.observer import CacheObserver
from text_generation_router.scheduling.memory.radix_tree import Found, Node, RadixTree
from text_generation_router.scheduling.memory.slots import Slots, TokenSlots
from text_generation_router.scheduling.memory.trails import Ids


class PrefixCache:
    """A radix tree whose nodes own the slots of their tokens. Evicted slots return to `pool`. `observer` is told of
    each change."""

    def __init__(self, pool: TokenSlots, observer: CacheObserver | None = None) -> None:
        self.num_tokens = 0
        self.num_evictable = 0  # number of tokens that no request holds
        self.version = 0  # changes whenever a sequence may match more or less than before
        self._pool = pool
        self._tree = RadixTree()
        self._observer: CacheObserver | None = None
        self.observe(observer)
        self._now = 0  # counter that orders the uses of nodes
        # Heap of leaves that no request holds, by last use. Entries whose leaf has changed since are skipped.
        self._leaves: list[tuple[int, int, Node]] = []
        self._pushed = 0
        self._num_nodes = 0

    def observe(self, observer: CacheObserver | None) -> None:
        """From now on `observer`, and no other one, is told of each change. It is told first of all that is cached."""
        self._observer = observer
        if observer is not None:
            observer.begin()
            for node in self._tree.nodes():
                observer.added(node, len(node))

    def nodes(self) -> Iterator[Node]:
        """All nodes that a search may find. The tree may change while they are read."""
        return self._tree.nodes()

    def match(self, namespace: Hashable, ids: Ids) -> int:
        """Number of first tokens of `ids` that are cached."""
        found = self._tree.find(namespace, ids)
        return found.length if found else 0

    def lock(self, namespace: Hashable, ids: Ids) -> tuple[Node, Slots]:
        """Locks the longest cached prefix of `ids`. Returns its last node, for `unlock`, and its slots."""
        node = self._node_at(self._tree.find(namespace, ids) or Found(self._tree.root(namespace), 0, 0))
        self._hold(node)
        return node, slots_to(node)

    def unlock(self, node: Node) -> None:
        self._now += 1
        detached = None
        for held in node.path():
            detached = held if held.is_detached else detached
            held.locks -= 1
            assert held.locks >= 0, "a node was unlocked twice"
            if not held.locks:
                held.used = self._now
                self.num_evictable += len(held)
                self._note_leaf(held)
        if detached is not None:
            self._sweep(detached)
        self._tree.drop_empty_root(node)

    @staticmethod
    def num_exclusive(node: Node | None) -> int:
        """Number of tokens that would become evictable if one lock on `node` were released."""
        count = 0
        while node is not None and node.locks == 1:
            count += len(node.ids)
            node = node.parent
        return count

    @staticmethod
    def is_locked_twice(node: Node | None) -> bool:
        """Whether any node on the path to `node` has exactly two locks."""
        return node is not None and any(held.locks == 2 for held in node.path())

    def extend(self, held: Node, ids: Ids, slots: Slots) -> Node | None:
        """Appends tokens to the sequence that ends with the locked node `held`. From now on the tree owns their slots,
        and the lock is on the returned node. None: nothing changed, because another request has already added the same
        first token.
        """
        if int(ids[0]) in held.children:
            return None
        self.version += 1
        self.num_tokens += len(ids)
        if held.parent is not None and not held.children and held.locks == 1:
            # A leaf with a single lock is lengthened, so that not every chunk becomes a node.
            held.ids, held.slots = np.concatenate([held.ids, ids]), np.concatenate([held.slots, slots])
            held.edits += 1
            if self._observer is not None:
                self._observer.added(held, len(ids))
            return held
        leaf = self._tree.add(held, ids.copy(), slots.copy())
        leaf.locks = 1
        self._num_nodes += 1
        if self._observer is not None:
            self._observer.added(leaf, len(ids))
        return leaf

    def insert(self, namespace: Hashable, ids: Ids, slots: Slots) -> int:
        """Adds a whole sequence that no request needs any more. Returns how many of its first tokens were cached
        before; the tree owns the slots of the other tokens, and only those slots, from now on."""
        found = self._tree.find(namespace, ids) or Found(self._tree.root(namespace), 0, 0)
        known = found.length
        if known < len(ids):
            node = self._node_at(found)
            self._now += 1
            self._hold(node)
            self.unlock(self.extend(node, ids[known:], slots[known:]) or node)
        return known

    def evict(self, count: int) -> None:
        """Evicts `count` tokens, from the ends of sequences."""
        assert count <= self.num_evictable
        self.version += 1
        while count > 0:
            used, _, leaf = heapq.heappop(self._leaves)
            if not _is_evictable(leaf) or leaf.used != used:
                continue
            kept = max(0, len(leaf) - count)
            count -= len(leaf) - kept
            self._trim(leaf, kept)
            self._note_leaf(leaf)

    def _trim(self, leaf: Node, kept: int) -> None:
        """Evicts all but the first `kept` tokens of a leaf. A parent whose last child is evicted becomes a leaf."""
        if self._observer is not None:
            self._observer.cut(leaf, kept)
        freed = leaf.slots[kept:]
        self._pool.release(freed)
        self.num_tokens -= len(freed)
        self.num_evictable -= len(freed)
        if kept:
            leaf.ids, leaf.slots = leaf.ids[:kept].copy(), leaf.slots[:kept].copy()
            leaf.edits += 1
            return
        parent = leaf.parent
        self._tree.remove(leaf)
        self._num_nodes -= 1
        if parent is not None:
            self._note_leaf(parent)

    def forget(self, namespace: Hashable, ids: Ids, start: int) -> None:
        """Removes from the cache the tokens of a sequence from token `start` on, and all sequences that continue them.
        Locked nodes are evicted when the last lock is released.
        """
        found = self._tree.find(namespace, ids[: start + 1])
        if found is None or found.length <= start:
            return
        if found.inside > 1:
            self._node_at(Found(found.node, found.inside - 1, start))
        self.version += 1
        self._tree.detach(found.node)
        if self._observer is not None:
            self._observer.detached(found.node)
        self._sweep(found.node)

    def is_forgotten(self, node: Node) -> bool:
        return any(held.is_detached for held in node.path())

    def _sweep(self, top: Node) -> None:
        """Evicts all nodes without locks in the subtree of `top`."""
        below = [top]
        for node in below:
            below.extend(node.children.values())
        for node in reversed(below):
            if not (node.locks or node.children):
                self._trim(node, 0)

    def _node_at(self, found: Found) -> Node:
        """The node that ends where the match ends, split off if necessary."""
        if found.inside == len(found.node):
            return found.node
        self._num_nodes += 1
        upper = self._tree.split(found.node, found.inside)
        if self._observer is not None:
            self._observer.split(upper, found.node)
        return upper

    def _hold(self, node: Node) -> None:
        for held in node.path():
            if not held.locks:
                self.num_evictable -= len(held)
            held.locks += 1

    def _note_leaf(self, node: Node) -> None:
        if not _is_evictable(node):
            return
        self._pushed += 1
        heapq.heappush(self._leaves, (node.used, self._pushed, node))
        if len(self._leaves) > 2 * self._num_nodes + 64:
            self._leaves = [entry for entry in self._leaves if _is_evictable(entry[2]) and entry[0] == entry[2].used]
            heapq.heapify(self._leaves)


def _is_evictable(node: Node) -> bool:
    return node.parent is not None and not node.children and not node.locks


def slots_to(node: Node) -> Slots:
    """The slots of all tokens from the root to the end of `node`."""
    runs = [held.slots for held in node.path()]
    return np.concatenate(runs[::-1])
