"""A tree over token ids: sequences that begin alike share nodes. What the nodes mean is for those who use it.

A node stands for a run of tokens, and its slots, if it has any, lie beside them. A *lock* on a node holds it and all
above it. Runs are compared as arrays, never token by token.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from text_generation_router.scheduling.slots import Slots
from text_generation_router.scheduling.trails import Ids, Trails, common_length

NOTHING: Ids = np.empty(0, dtype=np.int32)


class Node:
    """`ids` begin where the parent's end. Roots have none, and no parent, but the name of what they are the root of."""

    __slots__ = ("children", "edits", "ids", "is_detached", "locks", "namespace", "parent", "slots", "used")

    def __init__(self, parent: "Node | None", ids: Ids, slots: Slots, namespace: Hashable = "") -> None:
        self.parent = parent
        self.namespace = namespace
        self.ids = ids
        self.slots = slots
        self.children: dict[int, Node] = {}  # by their first token
        self.edits = 0  # changes of its end, or of what leads to it
        self.is_detached = False  # its parent does not know it any more, so nobody finds it
        self.locks = 0
        self.used = 0  # when it was last let go, in the tree's own time

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_in_tree(self) -> bool:
        return self.parent is not None

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
        self._trails: Trails[Node] = Trails()

    def root(self, namespace: Hashable) -> Node:
        return self._roots.setdefault(namespace, Node(None, NOTHING, NOTHING, namespace))

    def find(self, namespace: Hashable, ids: Ids) -> Found | None:
        """None: nobody has used this namespace."""
        root = self._roots.get(namespace)
        if root is None:
            return None
        trail, followed = self._trails.longest(namespace, ids)
        node, at = (trail.nodes[followed - 1], trail.ends[followed - 1]) if trail is not None else (root, 0)
        end, walked, same = len(ids), [], len(node)
        while at < end and (child := node.children.get(int(ids[at]))) is not None:
            node, same = child, common_length(child.ids, ids[at : at + len(child)])
            at += same
            if same < len(node):
                break
            walked.append(node)
        if walked or trail is not None:
            self._trails.note(namespace, ids, trail, followed, walked)
        return Found(node, same, at)

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
        below = [node]
        for lost in below:
            lost.edits += 1
            below.extend(lost.children.values())

    def drop_empty_root(self, node: Node) -> None:
        """If it is one, and nobody holds it."""
        if node.parent is None and not node.children and not node.locks:
            self._roots.pop(node.namespace, None)
