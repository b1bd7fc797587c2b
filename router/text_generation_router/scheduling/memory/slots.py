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
    """The slots 0 … capacity - 1. Free slots are a stack, whose top is sorted before a large allocation, so that
    prompts get runs of adjacent slots where there are any.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Slots are taken from the end of this array. It is in descending order, so that allocated slots ascend.
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._num_free = capacity
        self._is_free = np.ones(capacity, dtype=np.bool_)
        self._in_order = True

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.capacity - self._num_free

    def allocate(self, count: int) -> Slots:
        """Takes `count` slots. At least `count` must be free."""
        assert count <= self._num_free, f"{count} slots wanted, {self._num_free} free: admission is wrong"
        if count >= LARGE and not self._in_order:
            self._sort_top(count * LOOKED_AT)
        first = self._num_free - count
        slots = self._free[first : self._num_free][::-1].copy()
        self._num_free = first
        self._is_free[slots] = False
        return slots

    def release(self, slots: Slots) -> None:
        """Frees slots. They must be distinct and in use."""
        assert not self._is_free[slots].any(), "a slot was released twice"
        self._is_free[slots] = True
        self._free[self._num_free : self._num_free + len(slots)] = slots[::-1]
        self._num_free += len(slots)
        self._in_order = self._num_free == self.capacity
        if self._in_order:
            self._free[:] = np.arange(self.capacity - 1, -1, -1, dtype=np.int32)

    def _sort_top(self, count: int) -> None:
        top = self._free[max(0, self._num_free - count) : self._num_free]
        top[:] = np.sort(top)[::-1]
