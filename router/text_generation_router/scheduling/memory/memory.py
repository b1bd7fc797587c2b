"""Token memory: the pool of slots, the prefix cache, and the slots that each request holds.

The life of a slot is drawn in ARCHITECTURE.md, section 4. A request joins by `hold` and `start`, grows by
`take_one_each`, and leaves by `release`. Tokens that answered steps have computed enter the prefix cache by `confirm`
and `release`.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.memory.computed import ComputedHistory, without_conflicts
from text_generation_router.scheduling.memory.observer import CacheObserver
from text_generation_router.scheduling.memory.pending import PendingPrefixes
from text_generation_router.scheduling.memory.prefix_cache import PrefixCache
from text_generation_router.scheduling.memory.radix_tree import Node
from text_generation_router.scheduling.memory.slots import Slots, TokenSlots
from text_generation_router.scheduling.memory.trails import Ids

# The slots and the cached prefix that one request holds. Only `Memory` changes them.
#
# A slot is *held* as soon as its request takes it, *confirmed* once an answered step has computed the keys and values
# in it, and *cached* once the prefix cache owns it.

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
    max_computed: int  # number of tokens that were computed at the last release of the slots
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


# The cache evicts at least 1/PORTIONS of all slots at a time: evicting a few slots costs almost as much.
PORTIONS = 50
# Number of fresh prefix lookups in one step that serve only to order the waiting requests.
MAX_LOOKS = 8


class Memory:
    """All token slots. Each slot is free, or owned by the cache or by one request. Cached tokens that no request holds
    count as free.
    """

    def __init__(self, capacity: int, prefix_caching: bool, observer: CacheObserver | None = None) -> None:
        self.slots = TokenSlots(capacity)
        self.cache = PrefixCache(self.slots, observer)
        self._prefix_caching = prefix_caching
        self._portion = max(1, capacity // PORTIONS)
        self._pending = PendingPrefixes()
        self._under_way: dict[int, Node] = {}  # for the id of each prefilling request: node of its prompt in `_pending`
        # For the id of each waiting request: the cache's version at its last lookup, and the cached tokens found.
        self._remembered: dict[int, tuple[int, int]] = {}
        self._looks = 0  # fresh lookups left in this step

    @property
    def capacity(self) -> int:
        return self.slots.capacity

    @property
    def num_available(self) -> int:
        return self.slots.num_free + self.cache.num_evictable

    @property
    def num_held(self) -> int:
        """Number of slots that requests hold, private or cached. A slot that several requests share counts once."""
        return self.capacity - self.num_available

    def num_exclusive(self, request: Holder) -> int:
        """Number of slots that would become available if the request left now."""
        return self.exclusives([request])[0]

    def exclusives(self, requests: Iterable[Holder]) -> list[int]:
        """`num_exclusive` of each request."""
        num_exclusive, counts = self.cache.num_exclusive, []
        for request in requests:
            if (holding := request.holding) is None:
                counts.append(0)
            else:
                counts.append(holding.count - holding.num_cached + num_exclusive(holding.node))
        return counts

    def shares_with_one_other(self, request: Holder) -> bool:
        """Whether the request shares a cached node with exactly one other request, which held it alone before."""
        return request.holding is not None and self.cache.is_locked_twice(request.holding.node)

    def take_over(self, histories: Sequence[ComputedHistory]) -> None:
        """Caches what the shards have computed for another engine. To be called before anything else."""
        if self._prefix_caching:
            sound = without_conflicts(histories, self.capacity)
            new = [h.slots[self.cache.insert(h.namespace, h.ids, h.slots) :] for h in sound]
            self.slots.occupy(np.concatenate([np.empty(0, dtype=np.int32), *new]))

    # Waiting requests look for their prompts in the cache, and among the prompts that are being computed.

    def begin_step(self) -> None:
        self._looks = MAX_LOOKS

    def cached_length(self, request: Holder) -> int:
        """Number of cached first tokens of a waiting request, perhaps out of date: a step makes at most MAX_LOOKS fresh
        lookups, and then the last known value is used."""
        version, length = self._remembered.get(request.id, (-1, 0))
        if version != self.cache.version and self._looks:
            self._looks -= 1
            return self.cached_length_now(request)
        return length

    def cached_length_now(self, request: Holder) -> int:
        version, length = self._remembered.get(request.id, (-1, 0))
        if version != self.cache.version:
            length = self.cache.match(request.namespace, _matchable(request))
            self._remembered[request.id] = self.cache.version, length
        return length

    def forget_match(self, request: Holder) -> None:
        """Drops the remembered lookup of a request that waits no longer."""
        self._remembered.pop(request.id, None)

    def should_wait(self, request: Holder) -> bool:
        """Whether another request is computing enough of the same prefix to be worth waiting for."""
        cached = self.cached_length_now(request)
        return self._prefix_caching and self._pending.is_worth_waiting(request.namespace, _matchable(request), cached)

    # Slots go from free or cached to held.

    def hold(self, request: Holder) -> None:
        """Locks the cached prefix of the request's history."""
        holding = request.holding = Holding(request.max_tokens, None)
        if self._prefix_caching:
            holding.node, slots = self.cache.lock(request.namespace, _matchable(request))
            holding.take_cached(slots)
        request.fewest_cached = min(request.fewest_cached, holding.num_cached)

    def let_go(self, request: Holder) -> None:
        """Undoes `hold` for a request that will not start now."""
        holding = request.holding
        assert holding is not None and not holding.num_private
        request.holding = None
        if holding.node is not None:
            self.cache.unlock(holding.node)

    def start(self, request: Holder) -> None:
        """Takes slots for the whole history after the cached prefix. From now on other requests may wait for its
        prefix.
        """
        holding, history = request.holding, request.history
        assert holding is not None
        self.forget_match(request)
        holding.take(self._allocate(len(history) - holding.count))
        if self._prefix_caching:
            self._under_way[request.id] = self._pending.add(request.namespace, history)

    def take(self, request: Holder, count: int) -> None:
        """Takes slots for the next `count` positions."""
        assert request.holding is not None
        request.holding.take(self._allocate(count))

    def take_one_each(self, requests: Sequence[Holder]) -> Slots:
        """Takes a slot for the next position of each request. Returns these slots."""
        slots = self._allocate(len(requests))
        for request, slot in zip(requests, slots.tolist(), strict=True):
            holding = request.holding
            assert holding is not None
            holding.table[holding.count] = slot
            holding.count += 1
        return slots

    def _allocate(self, count: int) -> Slots:
        """Takes `count` free slots, evicting from the cache if necessary. At least `count` must be available."""
        if (missing := count - self.slots.num_free) > 0:
            portions = -(-missing // self._portion)
            self.cache.evict(min(portions * self._portion, self.cache.num_evictable))
        return self.slots.allocate(count)

    # Slots go from held to confirmed, then to cached, then to free.

    def confirm(self, request: Holder, end: int) -> None:
        """To be called when an answered step has computed a chunk that ends at `end`. Adds the tokens up to `end` to
        the cache, unless the same tokens are there already.
        """
        assert request.holding is not None
        request.holding.num_confirmed = max(request.holding.num_confirmed, end)
        self._offer(request)

    def _offer(self, request: Holder) -> None:
        holding, end = request.holding, request.num_computed
        assert holding is not None and end <= holding.count
        start = holding.num_offered
        if holding.node is None or end <= start or not holding.is_cacheable:
            return
        node = self.cache.extend(holding.node, request.history[start:end], holding.slots[start:end])
        if node is not None:
            holding.node, holding.num_offered = node, end
            holding.hand_over(start, end)

    def withdraw(self, request: Holder) -> None:
        """To be called when the prompt is computed, or will not be: from now on no request waits for it."""
        if (node := self._under_way.pop(request.id, None)) is not None:
            self._pending.remove(node)

    def release(self, request: Holder) -> None:
        """Frees all slots of the request. Its confirmed tokens stay cached, unless their keys and values are invalid
        (see `forget`).
        """
        holding, end = request.holding, request.num_computed
        assert holding is not None
        self.withdraw(request)
        self._offer(request)
        if (
            holding.node is not None
            and holding.is_cacheable
            and end > holding.num_offered
            and not self.cache.is_forgotten(holding.node)
        ):
            known = self.cache.insert(request.namespace, request.history[:end], holding.slots[:end])
            holding.hand_over(known, end)
        self.slots.release(holding.private)
        request.holding, request.max_computed = None, end
        if holding.node is not None:
            self.cache.unlock(holding.node)

    def forget(self, request: Holder) -> None:
        """Removes from the cache the keys and values computed for the request, and all that were computed from them."""
        assert request.holding is not None
        request.holding.is_cacheable = False
        if request.holding.node is not None:
            self.cache.forget(request.namespace, request.history, request.fewest_cached)


def _matchable(request: Holder) -> Ids:
    """The tokens to look for in the cache."""
    return request.history[: request.num_matchable]


# Checks the accounts of the token slots.


def find_error(memory: Memory, holders: Sequence[Holder]) -> str | None:
    """An error in the accounts, or None. Each slot must be free, or cached, or owned by one request. While there are no
    `holders` (requests with slots), no cached slot may be locked.
    """
    slots, cache = memory.slots, memory.cache
    private = sum(holder.holding.num_private for holder in holders if holder.holding)
    if slots.num_free + cache.num_tokens + private != slots.capacity:
        return f"{slots.num_free} free + {cache.num_tokens} cached + {private} held != {slots.capacity} slots"
    if not holders and cache.num_evictable != cache.num_tokens:
        return f"{cache.num_tokens - cache.num_evictable} cached slots are locked, but no request holds slots"
    return None
