"""Token memory: the pool of slots, the prefix cache, and what each request holds of both."""

from collections.abc import Iterable

from text_generation_router.scheduling.memory.pending import PendingPrefixes
from text_generation_router.scheduling.memory.prefix_cache import PrefixCache
from text_generation_router.scheduling.memory.radix_tree import NOTHING, Node
from text_generation_router.scheduling.memory.slots import Slots, TokenSlots
from text_generation_router.scheduling.memory.trails import Ids
from text_generation_router.scheduling.running import Running

# The cache evicts at least 1/PORTIONS of all slots at a time: evicting a few slots costs almost as much.
PORTIONS = 50
# Fresh prefix lookups in one step that only serve to order the waiting requests.
MAX_LOOKS = 8


class Memory:
    """Each slot is free, or owned by the cache or one request. Cached tokens that no request holds count as free."""

    def __init__(self, capacity: int, prefix_caching: bool) -> None:
        self.slots = TokenSlots(capacity)
        self.cache = PrefixCache(self.slots)
        self._prefix_caching = prefix_caching
        self._portion = max(1, capacity // PORTIONS)
        self._pending = PendingPrefixes()
        self._under_way: dict[int, Node] = {}  # id of a prefilling request → node of its prompt in `_pending`
        self._remembered: dict[int, tuple[int, int]] = {}  # id of a waiting request → cache version, cached tokens then
        self._looks = 0  # fresh lookups left in this step

    @property
    def capacity(self) -> int:
        return self.slots.capacity

    @property
    def num_available(self) -> int:
        return self.slots.num_free + self.cache.num_evictable

    @property
    def num_held(self) -> int:
        """Slots that requests need; a slot shared by several requests counts once."""
        return self.capacity - self.num_available

    def allocate(self, count: int) -> Slots:
        """Takes `count` free slots, evicting from the cache if necessary. At least `count` must be available."""
        if (missing := count - self.slots.num_free) > 0:
            portions = -(-missing // self._portion)
            self.cache.evict(min(portions * self._portion, self.cache.num_evictable))
        return self.slots.allocate(count)

    def begin_step(self) -> None:
        self._looks = MAX_LOOKS

    def cached_length(self, request: Running) -> int:
        """Number of cached first tokens of a waiting request, perhaps out of date: a step makes at most MAX_LOOKS fresh
        lookups, and then the last known value is used."""
        version, length = self._remembered.get(request.id, (-1, 0))
        if version != self.cache.version and self._looks:
            self._looks -= 1
            return self.cached_length_now(request)
        return length

    def cached_length_now(self, request: Running) -> int:
        version, length = self._remembered.get(request.id, (-1, 0))
        if version != self.cache.version:
            length = self.cache.match(request.request.namespace, _matchable(request))
            self._remembered[request.id] = self.cache.version, length
        return length

    def forget_match(self, request: Running) -> None:
        """Drops the remembered lookup of a request that waits no longer."""
        self._remembered.pop(request.id, None)

    def should_wait(self, request: Running) -> bool:
        """Whether another request is computing enough of the same prefix to be worth waiting for."""
        cached = self.cached_length_now(request)
        return self._prefix_caching and self._pending.is_worth_waiting(
            request.request.namespace, _matchable(request), cached
        )

    def hold(self, request: Running) -> None:
        """Locks the cached prefix of the request's history, and prepares the prefill of the rest."""
        node, slots = None, NOTHING
        if self._prefix_caching:
            node, slots = self.cache.lock(request.request.namespace, _matchable(request))
        request.start(node, slots)

    def let_go(self, request: Running) -> None:
        """Undoes `hold` for a request that does not start after all."""
        holding = request.holding
        assert holding is not None and not holding.num_private
        request.holding = None
        if holding.node is not None:
            self.cache.unlock(holding.node)

    def announce(self, request: Running) -> None:
        """The request's prompt is being computed: requests with the same prefix may wait for it."""
        if self._prefix_caching:
            self._under_way[request.id] = self._pending.add(request.request.namespace, request.history)

    def add(self, request: Running, count: int) -> None:
        assert request.holding is not None
        request.holding.add(self.allocate(count))

    def num_exclusive(self, request: Running) -> int:
        """Slots that would become available if the request left now."""
        return self.exclusives([request])[0]

    def exclusives(self, requests: Iterable[Running]) -> list[int]:
        """`num_exclusive` of each request."""
        counts = []
        for request in requests:
            holding = request.holding
            if holding is None:
                counts.append(0)
                continue
            count, node = holding.count - holding.num_cached, holding.node
            while node is not None and node.locks == 1:
                count += len(node.ids)
                node = node.parent
            counts.append(count)
        return counts

    def holds_what_one_held(self, request: Running) -> bool:
        """Whether the request shares a cached node with exactly one other request, which held it alone before."""
        node = request.holding.node if request.holding else None
        return node is not None and any(held.locks == 2 for held in node.path())

    def keep(self, request: Running) -> None:
        """Puts the request's confirmed tokens into the cache, unless the same tokens are there already."""
        holding, end = request.holding, request.num_computed
        assert holding is not None and end <= holding.count
        start = holding.kept
        if holding.node is None or end <= start or not request.is_good:
            return
        node = self.cache.extend(holding.node, request.history[start:end], holding.slots[start:end])
        if node is not None:
            holding.node, holding.kept = node, end
            holding.hand_over(start, end)

    def prefill_done(self, request: Running) -> None:
        """The prefill has finished or ended early: no request waits for it any longer."""
        if (node := self._under_way.pop(request.id, None)) is not None:
            self._pending.remove(node)

    def release(self, request: Running) -> None:
        """Gives all slots of the request back. Its confirmed tokens stay cached, unless they are bad (see `forget`)."""
        holding, end = request.holding, request.num_computed
        assert holding is not None
        self.prefill_done(request)
        self.keep(request)
        namespace = request.request.namespace
        is_good = request.is_good and not (holding.node is not None and self.cache.is_forgotten(holding.node))
        if holding.node is not None and is_good and end > holding.kept:
            known = self.cache.insert(namespace, request.history[:end], holding.slots[:end])
            holding.hand_over(known, end)
        self.slots.release(holding.private())
        request.holding, request.most_computed = None, end
        if holding.node is not None:
            self.cache.unlock(holding.node)

    def forget(self, request: Running) -> None:
        """Makes the keys and values computed for the request unfindable, and all computed on top of them."""
        if request.holding is not None and request.holding.node is not None:
            self.cache.forget(request.request.namespace, request.history, request.computed_from)


def _matchable(request: Running) -> Ids:
    """The last token is never matched: it must be computed, because the next token is sampled from its output."""
    return request.history[:-1]
