"""CPU time of a front to choose among many engines, by a front's own code: hashing a prompt is told apart."""

from collections.abc import Iterator
from itertools import cycle, islice
from time import thread_time

import numpy as np
import numpy.typing as npt

from text_generation_benchmark.output import table
from text_generation_router.engine.protocol import Ended, JoiningRules, ModelInfo, Snapshot, TokenLimits, Tokens
from text_generation_router.fleet.attempts import Attempts
from text_generation_router.fleet.best_score import BestScore
from text_generation_router.fleet.block_hashes import BLOCK_TOKENS, BlockHasher, HistoryHashes
from text_generation_router.fleet.cache_news import CacheNews
from text_generation_router.fleet.choice import EngineLoad
from text_generation_router.fleet.engines import EngineView, Fleet
from text_generation_router.fleet.requests import RemoteGroup, RemoteRequest
from text_generation_router.fleet.values import EngineFacts, RemoteCounts, ToldLoad
from text_generation_router.scheduling.request import GenerationRequest

KEY = bytes(32)
SYSTEM_BLOCKS, CHAT_BLOCKS, LONG_BLOCKS = 20, 50, 512
# Blocks that each engine has beside those of the measured prompts: 777,000 of 125 engines.
OTHER_BLOCKS = 6216
PROMPTS = 40  # prompts of each kind: not every look finds a block in the processor's cache
Times = npt.NDArray[np.float64]


class NoSink:
    """The sink of a request that is never computed."""

    def take(self, tokens: Tokens, ended: Ended | None) -> None: ...

    def ended(self, ended: Ended) -> None: ...


def measure(engines: int, calls: int) -> str:
    random = np.random.default_rng(0)
    chats = [_prompt(random, CHAT_BLOCKS) for _ in range(PROMPTS)]
    for chat in chats[1:]:
        chat[: SYSTEM_BLOCKS * BLOCK_TOKENS] = chats[0][: SYSTEM_BLOCKS * BLOCK_TOKENS]
    texts = [_prompt(random, LONG_BLOCKS) for _ in range(PROMPTS)]
    front = _front(random, engines, chats, texts)
    rows = [(f"hash {len(prompts[0]):,} tokens", _times(_hash(prompts), calls)) for prompts in (chats, texts)] + [
        (
            f"choose; all have {SYSTEM_BLOCKS} of {CHAT_BLOCKS} blocks, and one has all",
            _times(front.choose(chats), calls),
        ),
        (f"choose; each has another part of {LONG_BLOCKS} blocks", _times(front.choose(texts), calls)),
    ]
    lines = [(name, *(f"{np.quantile(times, q) * 1e6:.0f}" for q in (0.5, 0.9, 0.99))) for name, times in rows]
    return table((f"{engines} engines, microseconds", "median", "90 %", "99 %"), lines)


class ChoosingFront:
    def __init__(self, fleet: Fleet, placement: BestScore) -> None:
        self._fleet = fleet
        self._placement = placement

    def choose(self, prompts: list[npt.NDArray[np.int32]]) -> Iterator[float]:
        for number, prompt in enumerate(cycle(prompts), 1):
            group = _group(number, prompt)
            self._placement.choose(group, (0, 1))  # hashes the prompt
            began = thread_time()
            chosen = self._fleet.engine_for(group, 0.0)
            yield thread_time() - began
            assert chosen is not None


def _front(
    random: np.random.Generator, engines: int, chats: list[npt.NDArray[np.int32]], texts: list[npt.NDArray[np.int32]]
) -> ChoosingFront:
    placement = BestScore(KEY)
    fleet = Fleet(placement, resumes_across_builds=False)
    chat_hashes, text_hashes = ([_hashes(prompt) for prompt in prompts] for prompts in (chats, texts))
    snapshot = Snapshot(
        ModelInfo("bfloat16", "cuda", 2**17, 2**17, (), "triton", 8, 1),
        TokenLimits(2**17, 2**17, 2**20),
        JoiningRules(0.3, 20, None),
    )
    for engine in range(engines):
        facts = EngineFacts(str(engine), 1, b"digest", snapshot)
        load = EngineLoad(running=int(random.integers(20, 60)), waiting_tokens=int(random.integers(0, 20_000)))
        view = EngineView(facts, ToldLoad(load, 8), Attempts(engine, RemoteCounts(), lambda: None))
        fleet.join(engine, view, 0.0)
        has = random.integers(0, 2**63, OTHER_BLOCKS).tolist()
        for number, hashes in enumerate(chat_hashes):
            has += hashes[: SYSTEM_BLOCKS if number % engines != engine else None]
        for hashes in text_hashes:
            has += hashes[: LONG_BLOCKS * (engine + 1) // engines]
        assert fleet.cached(engine, 1, CacheNews(has, [], is_snapshot=True))
    return ChoosingFront(fleet, placement)


def _hash(prompts: list[npt.NDArray[np.int32]]) -> Iterator[float]:
    for ids in cycle([tuple(prompt.tolist()) for prompt in prompts]):
        began = thread_time()
        HistoryHashes(BlockHasher(KEY), (), ids)
        yield thread_time() - began


def _hashes(prompt: npt.NDArray[np.int32]) -> list[int]:
    return HistoryHashes(BlockHasher(KEY), (), prompt).hashes


def _times(times: Iterator[float], calls: int) -> Times:
    return np.fromiter(islice(times, calls), dtype=np.float64)


def _prompt(random: np.random.Generator, blocks: int) -> npt.NDArray[np.int32]:
    return random.integers(0, 2**17, blocks * BLOCK_TOKENS, dtype=np.int32)


def _group(number: int, prompt: npt.NDArray[np.int32]) -> RemoteGroup:
    request = GenerationRequest(tuple(prompt.tolist()), 1)
    group = RemoteGroup(number, request, 0.0, lambda refused: None)
    group.members[number] = RemoteRequest(number, request, NoSink(), 1, group)
    return group
