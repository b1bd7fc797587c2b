"""The largest nodes of the prefix tree, found in short slices: a tree may have tens of thousands of nodes."""

import heapq
from collections.abc import Callable, Iterator

from text_generation_router.scheduling.memory.prefix_cache import PrefixCache
from text_generation_router.scheduling.memory.radix_tree import Node
from text_generation_router.view.values import TreeColumns

# Number of nodes in the table; seconds of a slice; nodes between two looks at the clock.
MAX_NODES, SLICE_S, NODES_PER_LOOK = 200, 0.0005, 32

# Size, order in the walk (for nodes of equal size), node.
Entry = tuple[int, int, Node]


class TreeWalk:
    """Walks over a tree that may change between two slices: a node that leaves it meanwhile may be counted or not."""

    def __init__(self, cache: PrefixCache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._nodes: Iterator[Node] = cache.nodes()
        self._largest: list[Entry] = []
        self._num_seen = 0

    def go_on(self) -> bool:
        """Walks for SLICE_S. Returns whether the walk has come to its end."""
        until_s = self._clock() + SLICE_S
        for node in self._nodes:
            self._take(node)
            if self._num_seen % NODES_PER_LOOK == 0 and self._clock() >= until_s:
                return False
        return True

    def _take(self, node: Node) -> None:
        self._num_seen += 1
        entry = len(node), -self._num_seen, node
        if len(self._largest) < MAX_NODES:
            heapq.heappush(self._largest, entry)
        elif entry[:2] > self._largest[0][:2]:
            heapq.heapreplace(self._largest, entry)

    def table(self) -> TreeColumns:
        """The largest nodes that are in the tree still."""
        chosen = [node for _, _, node in sorted(self._largest, key=lambda entry: -entry[1]) if node.is_in_tree]
        places = {id(node): place for place, node in enumerate(chosen)}
        above = [list(node.path())[1:] for node in chosen]
        return TreeColumns(
            tokens=tuple(map(len, chosen)),
            parent=tuple(next((places[id(n)] for n in nodes if id(n) in places), -1) for nodes in above),
            before=tuple(sum(map(len, nodes)) for nodes in above),
            locks=tuple(node.locks for node in chosen),
            used=tuple(node.used for node in chosen),
            num_nodes=self._num_seen,
            num_tokens=self._cache.num_tokens,
        )
