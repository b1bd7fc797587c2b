"""A front's index says of each engine what its prefix cache matches, whatever messages are lost."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from text_generation_common.tests.examples import examples
from text_generation_router.fleet import cache_news
from text_generation_router.fleet.cache_index import MAX_LOOKS, CacheIndex
from text_generation_router.fleet.cache_news import BLOCK_TOKENS, BlockHasher, CacheLog, CacheNews, HistoryHashes, Ids
from text_generation_router.scheduling.memory.prefix_cache import PrefixCache
from text_generation_router.scheduling.memory.radix_tree import Node
from text_generation_router.scheduling.memory.slots import TokenSlots

HASHER = BlockHasher(bytes(32))
NAMESPACE = ("n",)
# Texts consist of such pieces, so that they part and end within blocks and at their ends.
PIECE = 24
texts = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(
    lambda pieces: np.concatenate([np.arange(PIECE, dtype=np.int32) + 100 * piece for piece in pieces])
)


def hashes_of(ids: Ids) -> list[int]:
    return HistoryHashes(HASHER, NAMESPACE, ids).hashes


def cached_hashes(cache: PrefixCache) -> set[int]:
    """The hashes of all whole blocks in the cache, each text hashed from its first token on."""
    found: set[int] = set()

    def walk(node: Node, before: list[Ids]) -> None:
        path = [*before, node.ids]
        found.update(hashes_of(np.concatenate(path)))
        for child in node.children.values():
            walk(child, path)

    for root in cache._tree._roots.values():
        walk(root, [])
    return found


class FrontAndEngine(RuleBasedStateMachine):
    """One prefix cache under random operations. Its news go to an index as those of engines 0 and 2; some messages of
    engine 2 are lost."""

    @initialize()
    def begin(self) -> None:
        self.pool = TokenSlots(3000)
        self.log = CacheLog(HASHER)
        self.cache = PrefixCache(self.pool, self.log.observer)
        self.held: list[tuple[Node, Ids]] = []  # locked nodes, and the texts that end with them
        self.told: list[Ids] = []
        self.index = CacheIndex(3)
        self.sequence: dict[int, int] = {}
        for engine in (0, 2):
            self.index.join(engine, 1000)
            self.ask(engine)

    def ask(self, engine: int) -> None:
        """Opens a News call: the index gets a snapshot of the engine's cache."""
        self.sequence[engine] = 0
        assert all(self.give(engine, news) for news in self.log.snapshot())

    def give(self, engine: int, news: CacheNews, is_lost: bool = False) -> bool:
        self.sequence[engine] += 1
        return is_lost or self.index.take(engine, self.sequence[engine], news)

    @rule(text=texts)
    def insert(self, text: Ids) -> None:
        """Caches the tokens of a request that has been computed. The text may begin as other texts do."""
        self.told.append(text)
        known = self.cache.match(NAMESPACE, text)
        if self.pool.num_free >= len(text):
            slots = self.pool.allocate(len(text))
            assert self.cache.insert(NAMESPACE, text, slots) == known
            self.pool.release(slots[:known])

    @rule(text=texts)
    def join(self, text: Ids) -> None:
        self.told.append(text)
        node, slots = self.cache.lock(NAMESPACE, text)
        self.held.append((node, text[: len(slots)]))

    @precondition(lambda self: self.held)
    @rule(text=texts, data=st.data())
    def extend(self, text: Ids, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.held) - 1))
        node, before = self.held[at]
        if self.pool.num_free < len(text):
            return
        slots = self.pool.allocate(len(text))
        longer = self.cache.extend(node, text, slots)
        if longer is None:
            self.pool.release(slots)
        else:
            self.held[at] = longer, np.concatenate([before, text])
            self.told.append(self.held[at][1])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        node, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.cache.unlock(node)

    @rule(count=st.integers(1, 500))
    def evict(self, count: int) -> None:
        self.cache.evict(min(count, self.cache.num_evictable))

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Forgets a text from a random token on; often a text that is held, so that a part of the tree is detached."""
        text = data.draw(st.sampled_from([held for _, held in self.held if len(held)] or self.told))
        self.cache.forget(NAMESPACE, text, data.draw(st.integers(0, len(text) - 1)))

    @rule()
    def lose_the_shards(self) -> None:
        self.pool = TokenSlots(3000)
        self.cache, self.held = PrefixCache(self.pool, self.log.observer), []

    @rule()
    def stop_observing_and_begin_again(self) -> None:
        self.cache.observe(None)
        self.log.end()
        assert not self.log.take() and self.log.snapshot() == [CacheNews([], [], is_snapshot=True)]
        self.cache.observe(self.log.observer)
        self.log.take()
        for engine in (0, 2):
            self.ask(engine)

    @rule(is_lost=st.booleans())
    def tell(self, is_lost: bool) -> None:
        for news in self.log.take():
            assert self.give(0, news)
            if not self.give(2, news, is_lost):
                self.ask(2)

    @invariant()
    def the_log_has_what_is_cached(self) -> None:
        assert set(self.log._blocks.hashes()) == cached_hashes(self.cache)

    def teardown(self) -> None:
        """In the end each front knows what is cached. A snapshot was asked for if anything was lost."""
        if not hasattr(self, "log"):
            return
        for news in [*self.log.take(), CacheNews([], [])]:
            assert self.give(0, news)
            if not self.give(2, news):
                self.ask(2)
        for text in self.told:
            matched = self.index.matched(hashes_of(text)).tolist()
            expected = self.cache.match(NAMESPACE, text) // BLOCK_TOKENS
            assert matched == [expected, 0, expected]
        assert self.index.num_blocks(0) == self.index.num_blocks(2) == len(cached_hashes(self.cache))


TestFrontAndEngine = FrontAndEngine.TestCase
TestFrontAndEngine.settings = examples(60, stateful_step_count=40)


def know(index: CacheIndex, engine: int, hashes: Sequence[int]) -> None:
    assert index.take(engine, 1, CacheNews(list(hashes), [], is_snapshot=True))


@given(lengths=st.lists(st.integers(0, MAX_LOOKS - 5), min_size=1, max_size=130), extra=st.integers(0, 5))
def test_an_index_counts_the_first_blocks_of_each_engine(lengths: list[int], extra: int) -> None:
    index, prompt = CacheIndex(len(lengths)), list(range(1000, 1000 + max(lengths) + extra))
    for engine, length in enumerate(lengths):
        index.join(engine, 100)
        know(index, engine, [*prompt[:length], 7])
    assert index.matched(prompt).tolist() == lengths
    index.leave(0)
    assert index.matched(prompt).tolist() == [0, *lengths[1:]]


@given(
    lengths=st.lists(st.integers(0, 1200), min_size=1, max_size=40),
    blocks=st.integers(MAX_LOOKS + 1, 1200),
    data=st.data(),
)
def test_of_a_long_prompt_an_engine_s_part_is_rounded_down_and_that_of_one_engine_is_exact(
    lengths: list[int], blocks: int, data: st.DataObject
) -> None:
    index, prompt, step = CacheIndex(len(lengths)), list(range(1000, 1000 + blocks)), -(-blocks // MAX_LOOKS)
    for engine, length in enumerate(lengths):
        index.join(engine, 2000)
        know(index, engine, prompt[:length])
    for engine, matched in enumerate(index.matched(prompt).tolist()):
        having = min(lengths[engine], blocks)
        assert matched == (having if having == blocks else having // step * step)
        assert index.matched_by(engine, prompt) == having


def test_an_index_that_engines_have_left_is_empty() -> None:
    index = CacheIndex(2)
    for engine in (0, 1):
        index.join(engine, 100)
        know(index, engine, range(50))
        assert index.take(engine, 2, CacheNews([60, 61], [3, 99]))
    assert index.num_blocks(0) == 51
    for engine in (0, 1):
        index.leave(engine)
    assert not index._engines


def test_a_snapshot_in_parts_takes_the_place_of_what_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_news, "MAX_HASHES", 2)
    pool, log = TokenSlots(1000), CacheLog(HASHER)
    text = np.arange(5 * BLOCK_TOKENS, dtype=np.int32)
    PrefixCache(pool, log.observer).insert(NAMESPACE, text, pool.allocate(len(text)))
    assert [len(news.added) for news in log.take()] == [2, 2, 1]
    first, second, last = log.snapshot()
    index = CacheIndex(1)
    index.join(0, 100)
    assert not index.take(0, 1, CacheNews([], [])), "a snapshot comes first"
    assert index.take(0, 1, first) and index.take(0, 2, second)
    assert not index.take(0, 4, CacheNews([], [])), "a message is missing"
    assert index.matched(hashes_of(text)).tolist() == [4], "what was known stays until all is told again"
    assert all(index.take(0, 1 + i, news) for i, news in enumerate((first, second, last)))
    assert index.take(0, 4, CacheNews([], [])) and not index.take(0, 4, CacheNews([], []))
    assert index.matched(hashes_of(text)).tolist() == [5] and index.num_blocks(0) == 5


def test_a_block_that_came_and_went_between_two_news_is_not_told() -> None:
    pool, log = TokenSlots(1000), CacheLog(HASHER)
    cache = PrefixCache(pool, log.observer)
    text = np.arange(3 * BLOCK_TOKENS, dtype=np.int32)
    cache.insert(NAMESPACE, text, pool.allocate(len(text)))
    cache.evict(BLOCK_TOKENS + 1)
    (news,) = log.take()
    assert (news.added, news.removed) == (hashes_of(text)[:1], [])
    cache.evict(BLOCK_TOKENS)
    cache.insert(NAMESPACE, text[:BLOCK_TOKENS], pool.allocate(BLOCK_TOKENS))
    assert not log.take()


def test_forgotten_tokens_are_removed_while_requests_hold_them_and_do_not_come_back() -> None:
    pool, log = TokenSlots(1000), CacheLog(HASHER)
    cache = PrefixCache(pool, log.observer)
    text = np.arange(4 * BLOCK_TOKENS, dtype=np.int32)
    cache.insert(NAMESPACE, text[: 2 * BLOCK_TOKENS], pool.allocate(2 * BLOCK_TOKENS))
    upper, _ = cache.lock(NAMESPACE, text[: BLOCK_TOKENS + 9])
    lower, _ = cache.lock(NAMESPACE, text)
    cache.forget(NAMESPACE, text, 9)
    assert cache.match(NAMESPACE, text) == 9 and not list(log._blocks.hashes())
    for node in (upper, lower):
        assert cache.extend(node, text[2 * BLOCK_TOKENS :] + 5, pool.allocate(2 * BLOCK_TOKENS))
    assert not list(log._blocks.hashes())


def test_texts_that_part_within_a_block_keep_their_blocks() -> None:
    pool, log = TokenSlots(1000), CacheLog(HASHER)
    cache = PrefixCache(pool, log.observer)
    text = np.arange(4 * BLOCK_TOKENS, dtype=np.int32)
    other = np.concatenate([text[: 2 * BLOCK_TOKENS + 9], text[:BLOCK_TOKENS]])
    for each in (text, other, text[: BLOCK_TOKENS + 1]):
        known = cache.match(NAMESPACE, each)
        node, _ = cache.lock(NAMESPACE, each)
        if known < len(each):
            node = cache.extend(node, each[known:], pool.allocate(len(each) - known)) or node
        cache.unlock(node)
        assert set(log._blocks.hashes()) == cached_hashes(cache)
    cache.evict(3 * BLOCK_TOKENS)
    assert set(log._blocks.hashes()) == cached_hashes(cache)


def test_an_engine_cannot_fill_the_memory_of_a_front() -> None:
    index = CacheIndex(2)
    index.join(0, 10)
    index.join(1, 10)
    know(index, 0, range(1000))
    know(index, 1, range(5))
    for sequence in range(1, 200):
        assert index.take(1, 1 + sequence, CacheNews([1000 + sequence], [999 + sequence]))
    known = index._known[1]
    assert len(index._engines) == 11 and index.num_ignored == 990 and len(known.hashes) <= 2 * 6 + 64


def test_a_block_that_is_expected_counts_until_its_time_is_over_or_the_engine_tells_of_it() -> None:
    index = CacheIndex(1)
    index.join(0, 100)
    know(index, 0, [1])
    index.expect(0, [1, 2, 3, 4], until_s=10.0)
    assert index.matched([1, 2, 3, 4]).tolist() == [4]
    assert index.take(0, 2, CacheNews([2], []))
    index.expect(0, [1, 2, 3], until_s=20.0)
    index.forget_expected(0, 10.0)
    assert index.matched([1, 2, 3, 4]).tolist() == [3]
    index.forget_expected(0, 20.0)
    assert index.matched([1, 2, 3, 4]).tolist() == [2] and index.num_blocks(0) == 2
