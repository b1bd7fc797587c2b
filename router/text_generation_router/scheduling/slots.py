"""The pool of token slots: who holds which, counted. A slot is the place of one token's keys and values in a shard."""

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int32]


class TokenSlots:
    """Slots 0 … capacity - 1. A stack of free ones: after a quiet moment allocations are contiguous again."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Taken from the end; descending, so that slots come out in ascending runs.
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._num_free = capacity
        self._holders = np.zeros(capacity, dtype=np.int32)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.capacity - self._num_free

    def allocate(self, count: int) -> Slots:
        """`count` slots with one holder each. The caller has made sure that they are there."""
        assert count <= self._num_free, f"{count} slots wanted, {self._num_free} free: admission is wrong"
        first = self._num_free - count
        slots = self._free[first : self._num_free][::-1].copy()
        self._num_free = first
        self._holders[slots] = 1
        return slots

    def retain(self, slots: Slots) -> None:
        """One more holder for each."""
        assert (self._holders[slots] > 0).all(), "a free slot cannot be shared"
        self._holders[slots] += 1

    def release(self, slots: Slots) -> None:
        """One holder less for each (distinct) slot; those without any are free."""
        assert (self._holders[slots] > 0).all(), "a slot was released twice"
        self._holders[slots] -= 1
        freed = slots[self._holders[slots] == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed[::-1]
        self._num_free += len(freed)
        if self._num_free == self.capacity:
            self._free[:] = np.arange(self.capacity - 1, -1, -1, dtype=np.int32)
