"""A tree over token ids: sequences that begin alike share nodes. What the nodes mean is for those who use it.

A node stands for a run of tokens, and its slots, if it has any, lie beside them. A *lock* on a node holds it and all
above it. Runs are compared as arrays, never token by token.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.slots import Slots

Ids = npt.NDArray[np.int32]
NOTHING: Ids = np.empty(0, dtype=np.int32)


class Node:
    """`ids` begin where the parent's end. Roots have none, and no parent, but the name of what they are the root of."""

    __slots__ = ("children", "ids", "is_detached", "locks", "namespace", "parent", "slots", "used")

    def __init__(self, parent: "Node | None", ids: Ids, slots: Slots, namespace: Hashable = "") -> None:
        self.parent = parent
        self.namespace = namespace
        self.ids = ids
        self.slots = slots
        self.children: dict[int, Node] = {}  # by their first token
        self.is_detached = False  # its parent does not know it any more, so nobody finds it
        self.locks = 0
        self.used = 0  # when it was last let go, in the tree's own time

    def __len__(self) -> int:
        return len(self.ids)

    def path(self) -> "Iterator[Node]":
        """It and all above it."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Found:
    """How far a sequence goes along the tree: `inside` tokens into `node`, `length` in all."""

    node: Node
    inside: int
    length: int


class RadixTree:
    """One tree for each namespace: nothing is shared between two of them."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}

    def root(self, namespace: Hashable) -> Node:
        return self._roots.setdefault(namespace, Node(None, NOTHING, NOTHING, namespace))

    def find(self, namespace: Hashable, ids: Ids) -> Found | None:
        """None: nobody has used this namespace."""
        node = self._roots.get(namespace)
        if node is None:
            return None
        at, end = 0, len(ids)
        while at < end and (child := node.children.get(int(ids[at]))) is not None:
            same = common_length(child.ids, ids[at:])
            at += same
            node = child
            if same < len(child):
                return Found(node, same, at)
        return Found(node, len(node), at)

    def split(self, node: Node, at: int) -> Node:
        """The first `at` tokens of a node become its parent, which is returned. Whoever holds the node holds both."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node)
        upper = Node(parent, node.ids[:at], node.slots[:at])
        upper.locks, upper.used = node.locks, node.used
        parent.children[int(upper.ids[0])] = upper
        node.ids, node.slots, node.parent = node.ids[at:], node.slots[at:], upper
        upper.children[int(node.ids[0])] = node
        return upper

    def add(self, parent: Node, ids: Ids, slots: Slots) -> Node:
        """A new leaf below `parent`. Both arrays are the tree's from now on."""
        leaf = Node(parent, ids, slots)
        assert int(ids[0]) not in parent.children
        parent.children[int(ids[0])] = leaf
        return leaf

    def remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None and not leaf.children
        if not leaf.is_detached:
            del parent.children[int(leaf.ids[0])]
        leaf.parent = None
        self.drop_empty_root(parent)

    def detach(self, node: Node) -> None:
        """Nobody finds it any more, nor what is below it. Whoever holds some of it goes on holding all above it."""
        assert node.parent is not None and not node.is_detached
        del node.parent.children[int(node.ids[0])]
        node.is_detached = True

    def drop_empty_root(self, node: Node) -> None:
        """If it is one, and nobody holds it."""
        if node.parent is None and not node.children and not node.locks:
            self._roots.pop(node.namespace, None)


def common_length(one: Ids, other: Ids) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    shorter = min(len(one), len(other))
    different = one[:shorter] != other[:shorter]
    at = int(different.argmax()) if shorter else 0
    return at if shorter and different[at] else shorter
