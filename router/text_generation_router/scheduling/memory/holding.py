"""The slots and the cached prefix that one request holds. Only `Memory` changes them.

A slot is *held* as soon as its request takes it, *confirmed* once an answered step has computed the keys and values in
it, and *cached* once the prefix cache owns it.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.memory.radix_tree import Node
from text_generation_router.scheduling.memory.slots import Slots
from text_generation_router.scheduling.memory.trails import Ids

Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Holding:
    """The slots of positions 0, 1, … of a request. Each slot is owned by the request or by the prefix cache."""

    most: int  # number of slots at the request's greatest length
    node: Node | None  # the locked node of the prefix cache; None without prefix caching
    count: int = 0  # number of slots in use
    num_cached: int = 0  # number of those slots that the cache owns
    num_confirmed: int = 0  # number of first tokens that were cached, or are in confirmed chunks
    num_offered: int = 0  # number of first tokens that the cache holds, up to `node`
    is_cacheable: bool = True  # False: other requests must not find the request's keys and values in the cache
    table: Slots = field(init=False)  # the slots of positions 0, 1, … up to the greatest length
    _is_cached: Flags = field(init=False)  # whether the prefix cache owns the slot of each position

    def __post_init__(self) -> None:
        self.table = np.empty(self.most, dtype=np.int32)
        self._is_cached = np.zeros(self.most, dtype=np.bool_)

    @property
    def slots(self) -> Slots:
        """The slots in use, in order of position."""
        return self.table[: self.count]

    @property
    def private(self) -> Slots:
        """The slots in use that the request owns."""
        return self.slots[~self._is_cached[: self.count]]

    @property
    def num_private(self) -> int:
        return self.count - self.num_cached

    def take(self, slots: Slots) -> None:
        """Adds `slots` as the slots of the next positions, owned by the request."""
        self.table[self.count : self.count + len(slots)] = slots
        self.count += len(slots)

    def take_cached(self, slots: Slots) -> None:
        """Adds `slots`, of the cached prefix that ends with `node`, as slots owned by the cache."""
        self.take(slots)
        self.hand_over(0, len(slots))
        self.num_confirmed = self.num_offered = len(slots)

    def hand_over(self, start: int, end: int) -> None:
        """Notes that the cache owns the slots of positions start … end - 1 from now on."""
        self._is_cached[start:end] = True
        self.num_cached += end - start


class Holder(Protocol):
    """The properties of a request that the memory needs."""

    holding: Holding | None  # set while the request runs or leaves
    most_computed: int  # number of tokens that were computed at the last release of the slots
    fewest_cached: int  # smallest number of cached tokens that any start of the request found

    @property
    def id(self) -> int: ...

    @property
    def namespace(self) -> Hashable:
        """Requests with different namespaces share no cached prefix."""

    @property
    def history(self) -> Ids:
        """Token ids of prompt and output."""

    @property
    def num_matchable(self) -> int:
        """Number of first tokens of the history that may come from the prefix cache."""

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the history at its greatest length."""

    @property
    def num_computed(self) -> int:
        """Number of first tokens whose keys and values an answered step has computed."""
