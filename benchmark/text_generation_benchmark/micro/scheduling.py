"""Processor time of the router's own work: decisions of the scheduler, the prefix cache, and detokenizing.

All take the time of this thread, which other processes affect less than wall time.
"""

import random
import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from tokenizers import Tokenizer

from text_generation_common.model_files import demo_directory
from text_generation_router.scheduling.memory.prefix_cache import PrefixCache
from text_generation_router.scheduling.memory.slots import TokenSlots
from text_generation_router.scheduling.request import GenerationRequest, Limits
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import ForwardStep, Step, StepAnswer
from text_generation_router.text.tokens.detokenization import TextStream, Vocabulary

RUNNING, WAITING, MAX_TOKENS = 256, 2000, 512
VOCABULARY = 32_000
TOKEN, END_TOKEN = 7, 2
PREFIXES, PREFIX_TOKENS = 20, 200
MATCHED_TOKENS = 4096
# A completion client sends its whole text again after each keystroke, which adds this many tokens.
KEYSTROKES, KEYSTROKE_TOKENS = 4000, 3
MATCHES = 1000
DETOKENIZED, PROMPT_TOKENS = 2000, 500
STOPS: Mapping[str, Sequence[str]] = {"no stop strings": (), "two stop strings": ("\nObservation:", "<|im_end|>")}


def decide(steps: int = 2000) -> dict[str, Sequence[float]]:
    load = SteadyRequests()
    while load.scheduler.active.num_running < RUNNING:
        load.step()
    load.decisions_s.clear()
    load.answers_s.clear()
    for _ in range(steps):
        load.step()
    return {
        f"to choose a step ({RUNNING} running, {WAITING:,} waiting)": load.decisions_s,
        "to take a step's answer": load.answers_s,
        f"to match a cached prefix of {MATCHED_TOKENS:,} tokens": _match_times(MATCHES),
        f"to match a text that came in {KEYSTROKES:,} keystrokes": _keystroke_match_times(MATCHES),
    }


def detokenize(rounds: int = 50) -> dict[str, Sequence[float]]:
    """Seconds per token. Each round has other random tokens, the same for each case."""
    vocabulary = Vocabulary.of(Tokenizer.from_file(str(demo_directory() / "tokenizer.json")))
    ordinary = [i for i in range(vocabulary.tokenizer.get_vocab_size()) if i not in vocabulary.special_ids]
    draw = random.Random(0)
    drawn = [draw.choices(ordinary, k=PROMPT_TOKENS + DETOKENIZED) for _ in range(rounds)]
    return {name: [_detokenize(vocabulary, ids, stop) for ids in drawn] for name, stop in STOPS.items()}


def _detokenize(vocabulary: Vocabulary, ids: Sequence[int], stop: Sequence[str]) -> float:
    stream = TextStream(vocabulary, ids[:PROMPT_TOKENS], stop)
    start = time.thread_time()
    for token_id in ids[PROMPT_TOKENS:]:
        stream.push(token_id)
    stream.flush()
    stream.text()
    return (time.thread_time() - start) / DETOKENIZED


class SteadyRequests:
    """A scheduler under steady load: whenever a request ends, another one arrives, so the queue keeps its length."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        capacity = RUNNING * MAX_TOKENS
        self.scheduler = Scheduler(
            Limits(capacity, RUNNING, max_batch_prefill_tokens=4096), end_tokens=frozenset({END_TOKEN})
        )
        self.prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(PREFIXES)]
        self.left: dict[int, int] = {}  # number of output tokens that each request will still make, by its id
        self.in_flight: deque[Step] = deque()
        self.decisions_s: list[float] = []
        self.answers_s: list[float] = []
        for _ in range(RUNNING + WAITING):
            self._arrive()

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.integers(0, VOCABULARY, count).tolist())

    def _arrive(self) -> None:
        prefix = self.prefixes[int(self.random.integers(PREFIXES))]
        prompt = prefix + self._tokens(int(self.random.integers(50, 300)))
        running = self.scheduler.add(GenerationRequest(prompt, MAX_TOKENS))
        self.left[running.id] = int(np.clip(self.random.lognormal(5, 0.6), 1, MAX_TOKENS))

    def step(self) -> None:
        """Decides until two steps are in flight, as the engine does, then answers the oldest."""
        while sum(isinstance(step, ForwardStep) for step in self.in_flight) < 2:
            started = time.thread_time()
            step = self.scheduler.next_step()
            if step is None:
                break
            self.in_flight.append(step)
            if isinstance(step, ForwardStep):
                self.decisions_s.append(time.thread_time() - started)
        step = self.in_flight.popleft()
        request_ids, token_ids = self._compute(step)
        started = time.thread_time()
        applied = self.scheduler.apply(StepAnswer(step.number, request_ids, token_ids))
        self.answers_s.append(time.thread_time() - started)
        for request_id in applied.freed:
            del self.left[request_id]
        for _ in applied.ended:
            self._arrive()

    def _compute(self, step: Step) -> tuple[list[int], list[int]]:
        """The answer of the shards to a step: ids of requests, and one token id for each."""
        if not isinstance(step, ForwardStep):
            return [], []
        request_ids = [*step.decode_ids, *(chunk.request_id for chunk in step.chunks if chunk.last)]
        for request_id in request_ids:
            self.left[request_id] -= 1
        return request_ids, [TOKEN if self.left[request_id] else END_TOKEN for request_id in request_ids]


def _match_times(repeats: int) -> list[float]:
    pool = TokenSlots(MATCHED_TOKENS)
    cache = PrefixCache(pool)
    ids = np.arange(MATCHED_TOKENS, dtype=np.int32)
    cache.insert("", ids, pool.allocate(MATCHED_TOKENS))
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        assert cache.match("", ids) == MATCHED_TOKENS
        times.append(time.thread_time() - started)
    return times


def _keystroke_match_times(last: int) -> list[float]:
    """Seconds to match the text after each of the `last` keystrokes; the cache holds the text before that keystroke.
    Every keystroke adds a node to the tree, and beside it a node with one generated token."""
    pool = TokenSlots(2 * KEYSTROKES * KEYSTROKE_TOKENS)
    cache = PrefixCache(pool)
    text = np.arange(KEYSTROKES * KEYSTROKE_TOKENS, dtype=np.int32)
    times = []
    for end in range(KEYSTROKE_TOKENS, len(text) + 1, KEYSTROKE_TOKENS):
        started = time.thread_time()
        known = cache.match("", text[:end])
        times.append(time.thread_time() - started)
        assert known == end - KEYSTROKE_TOKENS
        node, _ = cache.lock("", text[:end])
        generated = np.append(text[known:end], np.int32(VOCABULARY))
        cache.unlock(cache.extend(node, generated, pool.allocate(len(generated))) or node)
    return times[-last:]
