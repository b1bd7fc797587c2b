"""Prefixes that are being computed now. A request with such a prefix saves work by waiting for it."""

from collections.abc import Hashable

from text_generation_router.scheduling.memory.radix_tree import NOTHING, Node, RadixTree
from text_generation_router.scheduling.memory.trails import Ids

# A request waits for a prefix only if that saves at least this many tokens.
WORTH_WAITING = 16


class PendingPrefixes:
    """The prompts that are being computed, as a tree. The locks of a node count the prompts that pass through it; a
    node without locks is removed.
    """

    def __init__(self) -> None:
        self._tree = RadixTree()

    def add(self, namespace: Hashable, ids: Ids) -> Node:
        """Adds a prompt. Returns its last node, for `remove`."""
        node = self._tree.root(namespace)
        found = self._tree.find(namespace, ids)
        assert found is not None
        node = found.node if found.inside == len(found.node) else self._tree.split(found.node, found.inside)
        if found.length < len(ids):
            node = self._tree.add(node, ids[found.length :], NOTHING)
        for held in node.path():
            held.locks += 1
        return node

    def remove(self, node: Node) -> None:
        for held in list(node.path()):
            held.locks -= 1
            if not held.locks:
                if held.parent is not None:
                    self._tree.remove(held)
                else:
                    self._tree.drop_empty_root(held)

    def is_worth_waiting(self, namespace: Hashable, ids: Ids, cached: int) -> bool:
        """Whether a running prefill covers at least WORTH_WAITING tokens of `ids` beyond the `cached` first tokens."""
        found = self._tree.find(namespace, ids)
        return found is not None and found.length >= cached + WORTH_WAITING
