"""CPU time of a front to choose among many engines, by a front's own code: hashing a prompt is told apart."""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from time import thread_time

import numpy as np
import numpy.typing as npt

from text_generation_router.engine.protocol import Ended, JoiningRules, ModelInfo, Snapshot, TokenLimits, Tokens
from text_generation_router.fleet.attempts import Attempts
from text_generation_router.fleet.cache_news import BLOCK_TOKENS, BlockHasher, CacheNews, HistoryHashes
from text_generation_router.fleet.choice import MAX_ENGINES, EngineLoad
from text_generation_router.fleet.engines import EngineView, Fleet
from text_generation_router.fleet.placement import BestScore
from text_generation_router.fleet.requests import RemoteGroup, RemoteRequest
from text_generation_router.fleet.values import EngineFacts, LoadReport, RemoteCounts
from text_generation_router.scheduling.request import GenerationRequest

KEY = bytes(32)
SYSTEM_BLOCKS, CHAT_BLOCKS, LONG_BLOCKS = 20, 50, 512
# Blocks that each engine has beside those of the measured prompts: 777,000 of 125 engines.
OTHER_BLOCKS = 6216
PROMPTS = 40  # prompts of each kind: not every look finds a block in the processor's cache
Ids = npt.NDArray[np.int32]


class NoSink:
    """The sink of a request that is never computed."""

    def take(self, tokens: Tokens, ended: Ended | None) -> None: ...

    def ended(self, ended: Ended) -> None: ...


def choose(engines: int = 125, calls: int = 2000) -> dict[str, Sequence[float]]:
    if not 2 <= engines <= MAX_ENGINES:
        raise ValueError(f"engines={engines}: a front chooses among 2 to {MAX_ENGINES}")
    random = np.random.default_rng(0)
    chats = [prompt_of(random, CHAT_BLOCKS) for _ in range(PROMPTS)]
    for chat in chats[1:]:
        chat[: SYSTEM_BLOCKS * BLOCK_TOKENS] = chats[0][: SYSTEM_BLOCKS * BLOCK_TOKENS]
    texts = [prompt_of(random, LONG_BLOCKS) for _ in range(PROMPTS)]
    fleet, placement = front_of(random, engines, chats, texts)
    rows = {f"to hash {len(prompts[0]):,} tokens": _hash(prompts) for prompts in (chats, texts)} | {
        f"to choose; all have {SYSTEM_BLOCKS} of {CHAT_BLOCKS} blocks, and one has all": _choose(
            fleet, placement, chats
        ),
        f"to choose; each has another part of {LONG_BLOCKS} blocks": _choose(fleet, placement, texts),
    }
    return {what: list(islice(times, calls)) for what, times in rows.items()}


def _choose(fleet: Fleet, placement: BestScore, prompts: list[Ids]) -> Iterator[float]:
    for number, prompt in enumerate(cycle(prompts), 1):
        group = _group(number, prompt)
        placement.choose(group, (0, 1))  # hashes the prompt
        began = thread_time()
        chosen = fleet.engine_for(group, 0.0)
        yield thread_time() - began
        assert chosen is not None


def front_of(random: np.random.Generator, engines: int, chats: list[Ids], texts: list[Ids]) -> tuple[Fleet, BestScore]:
    placement = BestScore(KEY)
    fleet = Fleet(placement, resumes_across_builds=False)
    chat_hashes, text_hashes = ([hashes_of(prompt) for prompt in prompts] for prompts in (chats, texts))
    snapshot = Snapshot(
        ModelInfo("bfloat16", "cuda", 2**17, 2**17, (), kernels="triton", world_size=8, epoch=1),
        TokenLimits(2**17, 2**17, 2**20),
        JoiningRules(0.3, 20, None),
    )
    for engine in range(engines):
        facts = EngineFacts(str(engine), 1, b"digest", snapshot)
        load = EngineLoad(running=int(random.integers(20, 60)), waiting_tokens=int(random.integers(0, 20_000)))
        view = EngineView(facts, LoadReport(load, 8), Attempts(engine, RemoteCounts(), lambda: None))
        fleet.join(engine, view, 0.0)
        has = random.integers(0, 2**63, OTHER_BLOCKS).tolist()
        for number, hashes in enumerate(chat_hashes):
            has += hashes[: SYSTEM_BLOCKS if number % engines != engine else None]
        for hashes in text_hashes:
            has += hashes[: LONG_BLOCKS * (engine + 1) // engines]
        assert fleet.cached(engine, 1, CacheNews(has, [], is_snapshot=True))
    return fleet, placement


def _hash(prompts: list[Ids]) -> Iterator[float]:
    for ids in cycle([tuple(prompt.tolist()) for prompt in prompts]):
        began = thread_time()
        HistoryHashes(BlockHasher(KEY), (), ids)
        yield thread_time() - began


def hashes_of(prompt: Ids) -> list[int]:
    return HistoryHashes(BlockHasher(KEY), (), prompt).hashes


def prompt_of(random: np.random.Generator, blocks: int) -> Ids:
    return random.integers(0, 2**17, blocks * BLOCK_TOKENS, dtype=np.int32)


def _group(number: int, prompt: Ids) -> RemoteGroup:
    request = GenerationRequest(tuple(prompt.tolist()), 1)
    group = RemoteGroup(number, request, 0.0, lambda refused: None)
    group.members[number] = RemoteRequest(number, request, NoSink(), 1, group)
    return group
