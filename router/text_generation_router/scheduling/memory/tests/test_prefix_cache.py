"""Tests each property of the prefix cache, and all together against a plain dictionary."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from text_generation_router.scheduling.memory.pending import PendingPrefixes
from text_generation_router.scheduling.memory.prefix_cache import PrefixCache
from text_generation_router.scheduling.memory.radix_tree import Node
from text_generation_router.scheduling.memory.slots import Slots, TokenSlots
from text_generation_router.scheduling.memory.trails import MAX_TRAILS, Ids, Trails, common_length


def ids(*tokens: int) -> Ids:
    return np.array(tokens, dtype=np.int32)


class Holder:
    """A sequence that is being computed, as by a request: its cached prefix, and slots of its own."""

    def __init__(self, cache: PrefixCache, pool: TokenSlots, tokens: Ids, namespace: str = "") -> None:
        self.cache, self.pool, self.tokens, self.namespace = cache, pool, tokens, namespace
        self.node, self.cached = cache.lock(namespace, tokens)

    def compute(self) -> "Holder":
        """Computes the tokens that were not cached."""
        own = self.pool.allocate(len(self.tokens) - len(self.cached))
        self.slots = np.concatenate([self.cached, own])
        start = len(self.cached)
        node = self.cache.extend(self.node, self.tokens[start:], own) if len(own) else None
        self.node, self.private = (node, own[:0]) if node else (self.node, own)
        return self

    def leave(self) -> Slots:
        if self.cache.is_forgotten(self.node):
            self.pool.release(self.private)
        elif len(self.private):
            known = self.cache.insert(self.namespace, self.tokens, self.slots)
            self.pool.release(self.private[: known - len(self.cached)])
        self.cache.unlock(self.node)
        return self.slots


@pytest.fixture
def pool() -> TokenSlots:
    return TokenSlots(100)


@pytest.fixture
def cache(pool: TokenSlots) -> PrefixCache:
    return PrefixCache(pool)


def test_a_sequence_matches_as_far_as_its_tokens_are_the_same(cache: PrefixCache, pool: TokenSlots) -> None:
    slots = Holder(cache, pool, ids(1, 2, 3, 4)).compute().leave()
    later = Holder(cache, pool, ids(1, 2, 7))
    assert later.cached.tolist() == slots[:2].tolist()
    assert cache.match("", ids(1, 2, 3, 4, 5)) == 4 and cache.match("", ids(2)) == 0


def test_namespaces_share_nothing_and_leave_nothing_behind(cache: PrefixCache, pool: TokenSlots) -> None:
    Holder(cache, pool, ids(1, 2, 3), "one").compute().leave()
    assert cache.match("one", ids(1, 2)) == 2 and cache.match("other", ids(1, 2)) == 0
    cache.evict(3)
    assert not cache._tree._roots and pool.num_free == 100


def test_locked_tokens_are_not_evicted(cache: PrefixCache, pool: TokenSlots) -> None:
    Holder(cache, pool, ids(1, 2, 3, 4)).compute().leave()
    held = Holder(cache, pool, ids(1, 2))
    assert cache.num_evictable == 2
    cache.evict(2)
    assert cache.match("", ids(1, 2, 3, 4)) == 2
    cache.unlock(held.node)
    assert cache.num_evictable == 2


def test_the_least_recently_used_sequence_is_evicted_first_from_its_end(cache: PrefixCache, pool: TokenSlots) -> None:
    Holder(cache, pool, ids(1, 1, 1)).compute().leave()
    Holder(cache, pool, ids(2, 2, 2)).compute().leave()
    Holder(cache, pool, ids(1, 1, 1)).compute().leave()
    cache.evict(2)
    assert cache.match("", ids(2, 2, 2)) == 1 and cache.match("", ids(1, 1, 1)) == 3


def test_nodes_are_counted_when_added_and_evicted(cache: PrefixCache, pool: TokenSlots) -> None:
    for _ in range(3):
        for last in (3, 4, 5):
            Holder(cache, pool, ids(1, 2, last)).compute().leave()
        assert cache._num_nodes == 4
        cache.evict(cache.num_evictable)
        assert cache._num_nodes == 0


def test_chunks_of_a_sequence_do_not_become_nodes(cache: PrefixCache, pool: TokenSlots) -> None:
    node, _ = cache.lock("", ids(5))
    for i in range(10):
        grown = cache.extend(node, ids(5, i), pool.allocate(2))
        assert grown is not None
        node = grown
    assert len(node) == 20 and len(list(node.path())) == 2


def test_equal_sequences_computed_twice_are_cached_once(cache: PrefixCache, pool: TokenSlots) -> None:
    """The slots of the second sequence stay private, and are freed when it leaves."""
    one, other = (Holder(cache, pool, ids(1, 2, 3)) for _ in range(2))
    one.compute()
    other.compute()
    assert len(other.private) == 3 and cache.num_tokens == 3
    other.leave()
    assert pool.num_used == 3 and cache.num_evictable == 0
    one.leave()
    assert pool.num_used == 3 and cache.num_evictable == 3


def test_a_forgotten_token_goes_with_all_tokens_that_follow_it(cache: PrefixCache, pool: TokenSlots) -> None:
    Holder(cache, pool, ids(1, 2, 3, 4)).compute().leave()
    Holder(cache, pool, ids(1, 2, 3, 5)).compute().leave()
    Holder(cache, pool, ids(1, 9)).compute().leave()
    cache.forget("", ids(1, 2, 3, 4), 1)
    assert cache.match("", ids(1, 2, 3, 5)) == 1 and cache.match("", ids(1, 9)) == 2 and pool.num_used == 2


def visits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an entry for each visited node of the tree."""
    compared: list[int] = []

    def count(one: Ids, other: Ids) -> int:
        compared.append(len(one))
        return common_length(one, other)

    monkeypatch.setattr("text_generation_router.scheduling.memory.radix_tree.common_length", count)
    return compared


@pytest.mark.parametrize("clients", [1, 3])
def test_a_text_that_grew_by_keystrokes_is_matched_in_few_comparisons(
    monkeypatch: pytest.MonkeyPatch, clients: int
) -> None:
    """Each keystroke of a completion client adds a node, and beside it a node of the tokens generated for it."""
    pool = TokenSlots(100_000)
    cache, compared = PrefixCache(pool), visits(monkeypatch)
    shared = np.arange(50)
    texts = [np.concatenate([shared, np.arange(3_000) + 10_000 * client]).astype(np.int32) for client in range(clients)]
    num_keys = 1_500 // clients
    for i in range(1, num_keys + 1):
        for client, text in enumerate(texts):
            prompt = text[: 50 + 2 * i]
            compared.clear()
            assert i == 1 or cache.match("", prompt) == 48 + 2 * i
            assert len(compared) <= 40 or i < 40
            Holder(cache, pool, np.append(prompt, np.int32(90_000 + client))).compute().leave()
    assert cache._num_nodes > 2_900
    compared.clear()
    assert cache.match("", texts[0]) == 50 + 2 * num_keys and len(compared) <= 40


def test_a_trail_is_not_followed_where_the_tree_has_changed() -> None:
    pool = TokenSlots(1000)
    cache = PrefixCache(pool)
    cache._tree._trails = Trails(long=0)
    text = np.arange(20, dtype=np.int32)
    for end in range(2, 20, 2):
        Holder(cache, pool, text[:end]).compute().leave()
    assert cache.match("", text) == 18
    cache.evict(9)
    assert cache.match("", text) == 9
    other = np.concatenate([text[:9], text[:9] + 100]).astype(np.int32)
    Holder(cache, pool, other).compute().leave()
    assert cache.match("", text) == 9 and cache.match("", other) == 18
    cache.forget("", other, 4)
    assert cache.match("", text) == cache.match("", other) == 4


def test_at_most_max_trails_trails_are_remembered() -> None:
    trails: Trails[Node] = Trails(long=0)
    for i in range(1_000):
        trails.note("", ids(i // 10, i), None, 0, [Node(None, ids(i), ids(i))])
    assert len(trails._by_use) == sum(map(len, trails._trails.values())) == MAX_TRAILS


def test_a_request_waits_for_a_running_prefill_that_saves_it_many_tokens() -> None:
    pending = PendingPrefixes()
    shared = np.arange(100, dtype=np.int32)
    node = pending.add("", np.append(shared, np.int32(7)))
    asked = np.append(shared, np.int32(8))
    assert pending.is_worth_waiting("", asked, cached=0) and not pending.is_worth_waiting("", asked, cached=95)
    assert not pending.is_worth_waiting("other", asked, cached=0)
    pending.remove(node)
    assert not pending.is_worth_waiting("", asked, cached=0) and not pending._tree._roots


class CacheMachine(RuleBasedStateMachine):
    """Sequences of the tokens 1 and 2 begin, are computed and leave. `content`: for each slot, the tokens from which
    its keys were computed."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = TokenSlots(60)
        self.cache = PrefixCache(self.pool)
        self.cache._tree._trails = Trails(long=0)  # because in so small a tree no path is long enough for the default
        self.pending = PendingPrefixes()
        self.under_way: list[tuple[Holder, Node]] = []
        self.computed: list[Holder] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(tokens=st.lists(st.integers(1, 2), min_size=1, max_size=12), namespace=st.sampled_from("ab"))
    def begin(self, tokens: list[int], namespace: str) -> None:
        holder = Holder(self.cache, self.pool, ids(*tokens), namespace)
        self.check(holder, holder.cached)
        assert self.cache.match(namespace, holder.tokens) == len(holder.cached)
        self.under_way.append((holder, self.pending.add(namespace, holder.tokens)))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        holder, place = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.pending.remove(place)
        wanted = len(holder.tokens) - len(holder.cached)
        if wanted > self.pool.num_free + self.cache.num_evictable:
            self.cache.unlock(holder.node)
            return
        if wanted > self.pool.num_free:
            self.cache.evict(wanted - self.pool.num_free)
        holder.compute()
        for position in range(len(holder.cached), len(holder.tokens)):
            written = holder.namespace, tuple(holder.tokens[: position + 1].tolist())
            self.content[int(holder.slots[position])] = written
        self.computed.append(holder)

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        holder = self.computed.pop(data.draw(st.integers(0, len(self.computed) - 1)))
        self.check(holder, holder.slots)
        holder.leave()

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def turn_out_bad(self, data: st.DataObject) -> None:
        """Makes the tokens that a sequence computed invalid: from now on no search finds them, although holders still
        lock them."""
        holder = self.computed[data.draw(st.integers(0, len(self.computed) - 1))]
        start = len(holder.cached)
        self.cache.forget(holder.namespace, holder.tokens, start)
        assert self.cache.match(holder.namespace, holder.tokens) <= start

    @precondition(lambda self: self.cache.num_evictable)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        free, count = self.pool.num_free, data.draw(st.integers(1, self.cache.num_evictable))
        self.cache.evict(count)
        assert self.pool.num_free == free + count

    def check(self, holder: Holder, slots: Slots) -> None:
        for position, slot in enumerate(slots.tolist()):
            assert self.content[slot] == (holder.namespace, tuple(holder.tokens[: position + 1].tolist()))

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        private = sum(len(holder.private) for holder in self.computed)
        assert self.pool.num_used == self.cache.num_tokens + private
        assert 0 <= self.cache.num_evictable <= self.cache.num_tokens

    def teardown(self) -> None:
        for holder, place in self.under_way:
            self.pending.remove(place)
            self.cache.unlock(holder.node)
        for holder in self.computed:
            holder.leave()
        assert self.cache.num_evictable == self.cache.num_tokens == self.pool.num_used
        if self.cache.num_tokens:
            self.cache.evict(self.cache.num_tokens)
        assert self.pool.num_used == 0 and not self.cache._tree._roots and not self.pending._tree._roots


TestCacheMachine = CacheMachine.TestCase
