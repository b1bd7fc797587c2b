"""What one request holds of the token memory. `Memory` alone changes it.

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

    most: int  # slots at the greatest length of the request
    node: Node | None  # the locked node of the prefix cache; None without prefix caching
    count: int = 0  # slots in use
    num_cached: int = 0  # slots among them that the cache owns
    num_confirmed: int = 0  # first tokens that were cached, or are in confirmed chunks
    num_offered: int = 0  # first tokens that the cache holds up to `node`
    is_cacheable: bool = True  # False: the keys and values must not be found in the cache
    table: Slots = field(init=False)  # the slot of each position, up to the greatest length
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
        """The slots of the next positions."""
        self.table[self.count : self.count + len(slots)] = slots
        self.count += len(slots)

    def take_cached(self, slots: Slots) -> None:
        """The slots of the cached prefix, up to `node`."""
        self.take(slots)
        self.hand_over(0, len(slots))
        self.num_confirmed = self.num_offered = len(slots)

    def hand_over(self, start: int, end: int) -> None:
        """The cache owns the slots of these positions from now on."""
        self._is_cached[start:end] = True
        self.num_cached += end - start


class Holder(Protocol):
    """What the memory knows of a request."""

    holding: Holding | None  # while the request runs or leaves
    most_computed: int  # computed tokens at the last release of the slots
    fewest_cached: int  # fewest cached tokens that any of its starts found

    @property
    def id(self) -> int: ...

    @property
    def namespace(self) -> Hashable:
        """Requests of different namespaces share no cached prefix."""

    @property
    def history(self) -> Ids:
        """Token ids of prompt and output."""

    @property
    def most_tokens(self) -> int:
        """Tokens of the history at its greatest length."""

    @property
    def num_computed(self) -> int:
        """First tokens whose keys and values an answered step has computed."""
