"""What a prefix cache tells an observer: which tokens it caches, and which it no longer caches."""

from typing import Protocol

from text_generation_router.scheduling.memory.radix_tree import Node


class CacheObserver(Protocol):
    """Is called at each change of the tree, within the scheduler's decisions: every method returns at once. Nodes are
    only read.
    """

    def begin(self) -> None:
        """A new, empty cache takes the place of the old one."""

    def added(self, node: Node, count: int) -> None:
        """The last `count` tokens of `node` are new. The node itself may be new."""

    def split(self, upper: Node, lower: Node) -> None:
        """The first tokens of `lower` have become its new parent `upper`."""

    def cut(self, leaf: Node, kept: int) -> None:
        """All but the first `kept` tokens of the leaf are evicted next. With 0 the leaf goes."""

    def detached(self, top: Node) -> None:
        """No search finds `top` and the nodes below it from now on."""
