"""A tree over token ids: sequences with equal first tokens share nodes.

A node stands for a run of tokens, and for their slots if the user of the tree needs slots. A *lock* on a node protects
the node and all nodes above it. Runs are compared as arrays, never token by token.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from text_generation_router.scheduling.memory.slots import Slots
from text_generation_router.scheduling.memory.trails import Ids, Trails, common_length

NOTHING: Ids = np.empty(0, dtype=np.int32)


class Node:
    """A node of the tree. `ids` continue the sequence of the parent. A root has no ids and no parent, and knows its
    namespace.
    """

    __slots__ = ("children", "edits", "ids", "is_detached", "locks", "namespace", "parent", "slots", "used")

    def __init__(self, parent: "Node | None", ids: Ids, slots: Slots, namespace: Hashable = "") -> None:
        self.parent = parent
        self.namespace = namespace
        self.ids = ids
        self.slots = slots
        self.children: dict[int, Node] = {}  # children by their first token
        self.edits = 0  # number of changes of this node's end, or of the tokens from the root to this node
        self.is_detached = False  # True once the node is no longer a child of its parent, so that no search finds it
        self.locks = 0
        self.used = 0  # time of the last unlock, by a counter of uses

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_in_tree(self) -> bool:
        return self.parent is not None

    def path(self) -> "Iterator[Node]":
        """Yields the node and all nodes above it, upwards."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Found:
    """The longest match of a sequence in the tree. It ends after `inside` tokens of `node`; `length` is its length in
    tokens.
    """

    node: Node
    inside: int
    length: int


class RadixTree:
    """A tree for each namespace. Different namespaces share no nodes."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._trails: Trails[Node] = Trails()

    def root(self, namespace: Hashable) -> Node:
        return self._roots.setdefault(namespace, Node(None, NOTHING, NOTHING, namespace))

    def nodes(self) -> Iterator[Node]:
        """All nodes that a search may find, without roots; each after the nodes above it."""
        below = list(self._roots.values())
        for node in below:
            below.extend(node.children.values())
            if node.parent is not None:
                yield node

    def find(self, namespace: Hashable, ids: Ids) -> Found | None:
        """The longest match of `ids`. None: the namespace has no tree."""
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
        """Splits the first `at` tokens of a node off as its new parent, which is returned. All locks hold both
        nodes."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node)
        upper = Node(parent, node.ids[:at], node.slots[:at])
        upper.locks, upper.used = node.locks, node.used
        parent.children[int(upper.ids[0])] = upper
        node.ids, node.slots, node.parent = node.ids[at:], node.slots[at:], upper
        upper.children[int(node.ids[0])] = node
        return upper

    def add(self, parent: Node, ids: Ids, slots: Slots) -> Node:
        """Adds a leaf below `parent`. The tree owns both arrays from now on."""
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
        """Removes the node and all nodes below it from all searches. Locks on them still protect all nodes above."""
        assert node.parent is not None and not node.is_detached
        del node.parent.children[int(node.ids[0])]
        node.is_detached = True
        below = [node]
        for lost in below:
            lost.edits += 1
            below.extend(lost.children.values())

    def drop_empty_root(self, node: Node) -> None:
        """Removes `node` if it is a root without children and locks."""
        if node.parent is None and not node.children and not node.locks:
            self._roots.pop(node.namespace, None)
