"""The pool of free token slots. A slot is the place of one token's keys and values in a shard.

Each slot in use has one owner: a request, or a node of the prefix cache. Nodes count the requests that share them.
"""

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int32]

# An allocation of at least LARGE slots first sorts LOOKED_AT times that number of free slots, so that it finds adjacent
# slots.
LARGE, LOOKED_AT = 16, 4


class TokenSlots:
    """The slots 0 … capacity - 1. Free slots are a stack whose top comes first. The top is sorted before a large
    allocation, so that prompts get runs of adjacent slots where there are any.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._stack = np.arange(capacity, dtype=np.int32)  # the free slots, from `_top` to the end
        self._top = 0
        self._is_free = np.ones(capacity, dtype=np.bool_)
        self._in_order = True

    @property
    def num_free(self) -> int:
        return self.capacity - self._top

    @property
    def num_used(self) -> int:
        return self._top

    @property
    def is_free(self) -> npt.NDArray[np.bool_]:
        """Whether each slot is free. Only to be read, and before the next change."""
        return self._is_free

    def allocate(self, count: int) -> Slots:
        """Takes `count` slots. At least `count` must be free."""
        assert count <= self.num_free, f"{count} slots wanted, {self.num_free} free: admission is wrong"
        if count >= LARGE and not self._in_order:
            self._sort_top(count * LOOKED_AT)
        slots = self._stack[self._top : self._top + count].copy()
        self._top += count
        self._is_free[slots] = False
        return slots

    def occupy(self, slots: Slots) -> None:
        """Takes these slots. They must be distinct and free."""
        assert self._is_free[slots].all() and len(np.unique(slots)) == len(slots), "a slot has two owners"
        self._is_free[slots] = False
        self._top += len(slots)
        self._stack[self._top :] = np.flatnonzero(self._is_free)
        self._in_order = True

    def release(self, slots: Slots) -> None:
        """Frees slots. They must be distinct and in use."""
        assert not self._is_free[slots].any(), "a slot was released twice"
        self._is_free[slots] = True
        self._top -= len(slots)
        self._stack[self._top : self._top + len(slots)] = slots
        self._in_order = not self._top
        if self._in_order:
            self._stack[:] = np.arange(self.capacity, dtype=np.int32)

    def _sort_top(self, count: int) -> None:
        self._stack[self._top : self._top + count].sort()
