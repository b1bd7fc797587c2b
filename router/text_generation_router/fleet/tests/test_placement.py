"""Which engine gets the texts of one prompt: by what engines have cached, on several fronts. And that placement does
next to nothing where there is one engine."""

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from text_generation_common.tests.examples import examples
from text_generation_router.engine.tests.fakes import Listener
from text_generation_router.fleet.cache_news import BLOCK_TOKENS, BlockHasher, CacheLog, CacheNews, Ids
from text_generation_router.fleet.choice import ROW_TOKENS, EngineLoad, PlacementPolicy
from text_generation_router.fleet.placement import (
    EXPECTED_S,
    BestScore,
    LeastLoad,
    LeastRequests,
    Placement,
    RoundRobin,
    placement_of,
)
from text_generation_router.fleet.requests import RemoteGroup, RemoteRequest
from text_generation_router.fleet.values import LoadReport
from text_generation_router.scheduling.memory.prefix_cache import PrefixCache
from text_generation_router.scheduling.memory.slots import TokenSlots
from text_generation_router.scheduling.request import GenerationRequest

KEY = bytes(range(32))
ENGINES = (0, 1, 2)
numbers = count(1)
# Texts of blocks, each of one of two kinds, so that many of them have the same beginning.
texts = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(
    lambda kinds: np.repeat(np.array(kinds, dtype=np.int32) + 1, BLOCK_TOKENS)
)
namespaces = st.sampled_from([(), ("one",), ("two",)])


def group_of(ids: Ids, namespace: tuple[str, ...] = (), output: tuple[int, ...] = (), now: float = 0.0) -> RemoteGroup:
    number = next(numbers)
    request = GenerationRequest(tuple(ids.tolist()), 5, namespace=namespace)
    group = RemoteGroup(number, request, now, lambda refused: None)
    group.members[number] = RemoteRequest(number, request, Listener(), 5, group, output_ids=list(output))
    group.wire_indexes, group.submitted_s = [number], now
    return group


def load_report(**load: int) -> LoadReport:
    return LoadReport(EngineLoad(**load), 8)


class Fronts(RuleBasedStateMachine):
    """Two fronts and three engines with real prefix caches, whose news come late, or get lost and are asked for."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.fronts = [BestScore(KEY, turn) for turn in range(2)]
        self.caches: dict[int, tuple[TokenSlots, PrefixCache, CacheLog]] = {}
        # For each front and engine: the news that the front has not got yet, and the number of the last news that it
        # got.
        self.news: dict[tuple[int, int], list[CacheNews]] = {}
        self.sequences: dict[tuple[int, int], int] = {}
        for engine in ENGINES:
            self.start(engine)

    def start(self, engine: int) -> None:
        pool, log = TokenSlots(10_000), CacheLog(BlockHasher(KEY))
        self.caches[engine] = pool, PrefixCache(pool, log.observer), log
        for number, front in enumerate(self.fronts):
            front.joined(engine, 10_000, lambda: 0)
            front.reported(engine, load_report(), 0, self.now)
            self.ask(number, engine)

    def ask(self, front: int, engine: int) -> None:
        self.sequences[front, engine] = 0
        self.news[front, engine] = self.caches[engine][2].snapshot()

    @rule(engine=st.sampled_from(ENGINES), ids=texts, namespace=namespaces)
    def compute(self, engine: int, ids: Ids, namespace: tuple[str, ...]) -> None:
        pool, cache, _ = self.caches[engine]
        slots = pool.allocate(len(ids))
        pool.release(slots[: cache.insert(namespace, ids, slots)])

    @rule(engine=st.sampled_from(ENGINES), tokens=st.integers(1, 400))
    def evict(self, engine: int, tokens: int) -> None:
        cache = self.caches[engine][1]
        cache.evict(min(tokens, cache.num_evictable))

    @rule(engine=st.sampled_from(ENGINES))
    def die_and_come_back(self, engine: int) -> None:
        for front in self.fronts:
            front.lost(engine)
        self.start(engine)

    @rule(lost=st.sampled_from([None, 0, 1]))
    def report(self, lost: int | None) -> None:
        """The engines report their changes. The first message to the front `lost` is lost."""
        for engine in ENGINES:
            for news in self.caches[engine][2].take():
                for front in range(2):
                    self.news[front, engine].append(news)
        if lost is not None:
            for engine in ENGINES:
                if self.news[lost, engine]:
                    self.sequences[lost, engine] += 1
                    del self.news[lost, engine][0]

    @rule(front=st.integers(0, 1), engine=st.sampled_from(ENGINES))
    def hear(self, front: int, engine: int) -> None:
        news, self.news[front, engine] = self.news[front, engine], []
        for each in news:
            self.sequences[front, engine] += 1
            if not self.fronts[front].cached(engine, self.sequences[front, engine], each):
                self.ask(front, engine)
                self.hear(front, engine)
                return

    @rule(front=st.integers(0, 1), ids=texts, namespace=namespaces, among=st.sets(st.sampled_from(ENGINES), min_size=2))
    def send(self, front: int, ids: Ids, namespace: tuple[str, ...], among: set[int]) -> None:
        """A front that may lack the newest news chooses one of the engines in `among`."""
        group = group_of(ids, namespace, now=self.now)
        engine = self.fronts[front].choose(group, list(among))
        assert engine in among
        self.fronts[front].sent(engine, group)

    @rule(ids=texts, namespace=namespaces, among=st.sets(st.sampled_from(ENGINES), min_size=2))
    def know_all_and_choose(self, ids: Ids, namespace: tuple[str, ...], among: set[int]) -> None:
        """Once all news have come and no block is expected, every front chooses an engine with most of the prompt."""
        self.report(None)
        self.now += EXPECTED_S
        for number, front in enumerate(self.fronts):
            for engine in ENGINES:
                self.news[number, engine].append(CacheNews([], []))  # the number of this message shows a loss
                self.hear(number, engine)
                front.reported(engine, load_report(), 10**9, self.now)
            matched = {engine: self.caches[engine][1].match(namespace, ids) // BLOCK_TOKENS for engine in among}
            chosen = front.choose(group_of(ids, namespace), list(among))
            assert matched[chosen] == max(matched.values())

    @invariant()
    def nothing_is_known_of_other_engines(self) -> None:
        if hasattr(self, "fronts"):
            assert all(set(front.index._known) == set(ENGINES) for front in self.fronts)


TestFronts = Fronts.TestCase
TestFronts.settings = examples(40, stateful_step_count=30)


def test_a_front_with_one_engine_hashes_nothing_and_wants_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    front = BestScore(KEY)
    front.joined(0, 1000, lambda: 0)
    front.reported(0, load_report(), 0, 0.0)
    ids = np.arange(10 * BLOCK_TOKENS, dtype=np.int32)
    with monkeypatch.context() as patches:
        patches.delattr(BlockHasher, "blocks")
        front.sent(0, group_of(ids))
    assert not front.wants_cache and not len(front.index)
    front.joined(1, 1000, lambda: 0)
    assert front.wants_cache
    front.lost(0)
    assert not front.wants_cache


def test_what_a_front_has_sent_counts_as_cached_until_its_time_is_over_and_only_the_rest_as_load() -> None:
    front = BestScore(KEY)
    for engine in (0, 1):
        front.joined(engine, 10_000, lambda: 0)
        front.reported(engine, load_report(), 0, 0.0)
    ids = np.arange(10 * BLOCK_TOKENS, dtype=np.int32)
    first = group_of(ids)
    engine = front.choose(first, [0, 1])
    front.sent(engine, first)
    assert front._choice.load(engine) == len(ids) + ROW_TOKENS
    again = group_of(ids, output=(1,) * BLOCK_TOKENS)
    front.sent(engine, again)
    assert front._choice.load(engine) == len(ids) + BLOCK_TOKENS + 2 * ROW_TOKENS, "the prompt is computed once"
    for other in (0, 1):
        front.reported(other, load_report(), 10**9, EXPECTED_S - 1)
    assert front.choose(again, [0, 1]) == engine == front.choose(again, [0, 1])
    for other in (0, 1):
        front.reported(other, load_report(), 10**9, EXPECTED_S)
    assert not len(front.index)


def test_prompts_of_other_namespaces_are_not_taken_for_cached() -> None:
    front = BestScore(KEY)
    for engine in (0, 1):
        front.joined(engine, 10_000, lambda: 0)
        front.reported(engine, load_report(running=1 - engine), 0, 0.0)
    ids = np.arange(10 * BLOCK_TOKENS, dtype=np.int32)
    front.sent(0, group_of(ids, ("adapter",)))
    assert front.choose(group_of(ids, ("adapter",)), [0, 1]) == 0
    assert front.choose(group_of(ids, ("another",)), [0, 1]) == front.choose(group_of(ids), [0, 1]) == 1


def test_a_policy_without_a_key_places_by_load() -> None:
    assert isinstance(placement_of(PlacementPolicy.SCORE, KEY, 0), BestScore)
    kinds = {PlacementPolicy.SCORE: LeastLoad, PlacementPolicy.LEAST_LOAD: LeastLoad}
    kinds |= {PlacementPolicy.LEAST_REQUESTS: LeastRequests, PlacementPolicy.ROUND_ROBIN: RoundRobin}
    for policy in PlacementPolicy:
        assert type(placement_of(policy, None, 0)) is kinds[policy]
        assert not placement_of(policy, None, 0).wants_cache


@pytest.mark.parametrize("policy", PlacementPolicy)
def test_idle_engines_are_chosen_in_turn(policy: PlacementPolicy) -> None:
    placement = placement_of(policy, KEY, 1)
    join_all(placement, {engine: lambda: 0 for engine in ENGINES})
    group = group_of(np.ones(5, dtype=np.int32))
    assert [placement.choose(group, ENGINES) for _ in range(4)] == [2, 0, 1, 2]
    assert [placement.choose(group, [0, 1]) for _ in range(3)] == [0, 1, 0]


def test_the_engine_with_the_fewest_requests_of_this_front_is_chosen() -> None:
    placement = LeastRequests()
    have = {0: 2, 1: 1, 2: 1}
    join_all(placement, {engine: lambda engine=engine: have[engine] for engine in ENGINES})  # type: ignore[misc]
    group = group_of(np.ones(5, dtype=np.int32))
    assert placement.choose(group, ENGINES) == 1
    have[1] = 5
    assert placement.choose(group, ENGINES) == 2 and placement.choose(group, [0, 1]) == 0


def join_all(placement: Placement, engines: dict[int, Callable[[], int]]) -> None:
    for engine, num_open in engines.items():
        placement.joined(engine, 1000, num_open)
        placement.reported(engine, load_report(), 0, 0.0)
