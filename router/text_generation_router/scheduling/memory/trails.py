"""Remembers long paths through a radix tree, so that the next search does not visit their nodes one by one.

A client that sends its text after every keystroke makes a node of each keystroke. Its next text follows the last one
through thousands of nodes of a few tokens each. A single comparison of both texts shows how many first tokens are
equal, and the search continues from there.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

# Number of nodes up to which a path is not remembered: visiting them costs about as much as comparing two texts.
LONG = 32
# At most MAX_TRAILS paths are remembered, and at most MAX_ALIKE of them with the same first tokens.
MAX_TRAILS, MAX_ALIKE = 64, 4
# A search compares its ids only with remembered paths that have the same FIRST first tokens.
FIRST = 8


class TrailNode(Protocol):
    """A node of the radix tree. The tokens from the root to the end of the node stay the same while the node is in the
    tree and its `edits` does not change.
    """

    edits: int

    @property
    def is_in_tree(self) -> bool: ...

    def __len__(self) -> int: ...


P = TypeVar("P", bound=TrailNode)


class Trail(Generic[P]):
    """The nodes that a sequence of tokens matched in full, from the root down."""

    __slots__ = ("edits", "ends", "ids", "key", "nodes")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.ids: Ids = np.empty(0, dtype=np.int32)  # token ids from the root at least to the end of the last node
        self.nodes: list[P] = []
        self.edits: list[int] = []  # `edits` of each node when the path was remembered
        self.ends: list[int] = []  # end of each node, in tokens from the root

    def common(self, ids: Ids) -> int:
        """Number of nodes of the trail that `ids` matches in full, if no node has changed since (see `valid`)."""
        return bisect_right(self.ends, common_length(self.ids, ids))

    def valid(self, count: int) -> int:
        """Number of the first `count` nodes that are unchanged. Sequences change only at their ends, so after a changed
        node all nodes are changed.
        """
        if not count or self._is_valid(count - 1):
            return count
        return bisect_right(range(count), False, key=lambda i: not self._is_valid(i))

    def _is_valid(self, i: int) -> bool:
        node = self.nodes[i]
        return node.is_in_tree and node.edits == self.edits[i]

    def cut(self, count: int) -> None:
        """Drops all but the first `count` nodes."""
        del self.nodes[count:], self.edits[count:], self.ends[count:]

    def copy(self, count: int) -> "Trail[P]":
        other: Trail[P] = Trail(self.key)
        other.ids = self.ids
        other.nodes, other.edits, other.ends = self.nodes[:count], self.edits[:count], self.ends[:count]
        return other

    def add(self, ids: Ids, nodes: list[P]) -> None:
        self.ids = ids
        for node in nodes:
            self.ends.append((self.ends[-1] if self.ends else 0) + len(node))
            self.nodes.append(node)
            self.edits.append(node.edits)


class Trails(Generic[P]):
    def __init__(self, long: int = LONG) -> None:
        self._long = long
        self._trails: dict[Hashable, list[Trail[P]]] = {}
        self._by_use: OrderedDict[Trail[P], None] = OrderedDict()

    def longest(self, namespace: Hashable, ids: Ids) -> tuple[Trail[P] | None, int]:
        """The trail that `ids` follows furthest, and how many of its nodes `ids` matches in full."""
        if not self._trails:
            return None, 0
        best, most = None, 0
        for trail in self._trails.get(_key(namespace, ids), ()):
            common = trail.common(ids)
            valid = trail.valid(common)
            if valid < common:
                trail.cut(valid)
            if valid > most:
                best, most = trail, valid
        return best, most

    def note(self, namespace: Hashable, ids: Ids, trail: Trail[P] | None, followed: int, walked: list[P]) -> None:
        """Remembers a search: `ids` matched the first `followed` nodes of `trail`, and then the nodes `walked`."""
        if trail is not None:
            self._by_use.move_to_end(trail)
            if len(trail.nodes) - followed <= self._long:
                trail.cut(followed)
                trail.add(ids, walked)
                return
        if len(walked) > self._long:
            new: Trail[P] = trail.copy(followed) if trail is not None else Trail(_key(namespace, ids))
            new.add(ids, walked)
            self._remember(new)

    def _remember(self, trail: Trail[P]) -> None:
        alike = self._trails.setdefault(trail.key, [])
        alike.append(trail)
        self._by_use[trail] = None
        if len(alike) > MAX_ALIKE:
            self._forget(min(alike, key=list(self._by_use).index))
        elif len(self._by_use) > MAX_TRAILS:
            self._forget(next(iter(self._by_use)))

    def _forget(self, trail: Trail[P]) -> None:
        del self._by_use[trail]
        self._trails[trail.key].remove(trail)
        if not self._trails[trail.key]:
            del self._trails[trail.key]


def _key(namespace: Hashable, ids: Ids) -> Hashable:
    return namespace, ids[:FIRST].tobytes()


def common_length(one: Ids, other: Ids) -> int:
    """Number of equal first tokens of two sequences."""
    shorter = min(len(one), len(other))
    different = one[:shorter] != other[:shorter]
    at = int(different.argmax()) if shorter else 0
    return at if shorter and different[at] else shorter
