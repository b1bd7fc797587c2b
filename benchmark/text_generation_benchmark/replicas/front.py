"""One front in simulated time: it knows what engines tell, and chooses an engine for each request."""

from enum import StrEnum
from time import thread_time

from text_generation_benchmark.replicas.chats import Ids
from text_generation_router.fleet.cache_index import CacheIndex
from text_generation_router.fleet.cache_news import BLOCK_TOKENS, BlockHasher, CacheNews, HistoryHashes
from text_generation_router.fleet.choice import EngineChoice, EngineLoad

HASHER = BlockHasher(bytes(32))
NAMESPACE = ("simulation",)
# Seconds for which the blocks of a request that was sent count as cached, if the engine does not tell of them.
EXPECTED_S = 10.0


class Policy(StrEnum):
    ROUND_ROBIN = "round robin"
    LEAST_REQUESTS = "least requests"
    SCORE = "score"


class SimulatedFront:
    """`turn`: where its turns begin, different for each front."""

    def __init__(self, policy: Policy, num_engines: int, max_blocks: int, turn: int) -> None:
        self.index = CacheIndex(num_engines)
        self.choice = EngineChoice(num_engines, turn)
        self.num_sent = 0
        # Seconds of processor time: for each request, and of all Load and Cache messages.
        self.hashing_s: list[float] = []
        self.choosing_s: list[float] = []
        self.news_s = 0.0
        self._policy, self._turn, self._max_blocks = policy, turn, max_blocks
        self._unfinished, self._sequences = [0] * num_engines, [0] * num_engines

    def choose(self, ids: Ids, now_s: float) -> int | None:
        """The engine that gets the request, which is noted as sent. None: there is no engine."""
        started = thread_time()
        hashes = HistoryHashes(HASHER, NAMESPACE, ids).hashes if self._policy is Policy.SCORE else []
        hashed = thread_time()
        engine = self._choose(hashes)
        self.choosing_s.append(thread_time() - hashed)
        self.hashing_s.append(hashed - started)
        if engine is not None:
            self.send(engine, ids, hashes, now_s)
        return engine

    def send(self, engine: int, ids: Ids, hashes: list[int], now_s: float) -> None:
        cached = self.index.matched_by(engine, hashes) * BLOCK_TOKENS
        self.num_sent += 1
        self.choice.send(engine, self.num_sent, len(ids) - cached)
        if hashes:
            self.index.expect(engine, hashes, now_s + EXPECTED_S)
        self._unfinished[engine] += 1

    def leave(self, engine: int) -> None:
        """One of its requests has ended on the engine, or was taken back."""
        self._unfinished[engine] -= 1

    def take_report(self, engine: int, load: EngineLoad, news: list[CacheNews]) -> None:
        started = thread_time()
        self.choice.take_report(engine, load, self.num_sent)
        if self._policy is Policy.SCORE:
            for each in news:
                self._sequences[engine] += 1
                assert self.index.take(engine, self._sequences[engine], each)
        self.news_s += thread_time() - started

    def tick(self, now_s: float) -> None:
        for engine in self.choice.open:
            self.index.forget_expected(engine, now_s)

    def join(self, engine: int, snapshot: list[CacheNews]) -> None:
        self.index.join(engine, self._max_blocks)
        self._sequences[engine] = self._unfinished[engine] = 0
        self.take_report(engine, EngineLoad(), snapshot)

    def lose(self, engine: int) -> None:
        self.index.leave(engine)
        self.choice.lose(engine)

    def _choose(self, hashes: list[int]) -> int | None:
        if self._policy is Policy.SCORE:
            return self.choice.choose(self.index.matched(hashes), len(hashes))
        self._turn += 1
        if not (engines := self.choice.open):
            return None
        start = self._turn % len(engines)
        in_turn = engines[start:] + engines[:start]
        return in_turn[0] if self._policy is Policy.ROUND_ROBIN else min(in_turn, key=self._unfinished.__getitem__)
