"""Fake shards and sinks, and an engine between them. As with a greedy model, each token depends only on the tokens
before it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from text_generation_common.errors import NOT_FINITE
from text_generation_common.flags.requests import SchedulingFlags, TokenFlags
from text_generation_common.sampling import Sampling
from text_generation_router.engine.lifecycle import EngineConfig
from text_generation_router.engine.local import LocalEngine
from text_generation_router.engine.protocol import Ended, EngineRun, ModelInfo, Tokens
from text_generation_router.engine.shards import ShardView, WarmupAnswer
from text_generation_router.errors import ShardsError, StepAbortedError
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.scheduling.request import NEW, EndReason, GenerationRequest, Past, Share
from text_generation_router.scheduling.step import (
    Chunk,
    ClearStep,
    FilterStep,
    FirstChunk,
    ForwardStep,
    Step,
    StepAnswer,
)

INFO = ModelInfo("torch.float32", "cpu", 256, 512, (255,), "reference", 1, 1)
MANY = 10**9  # credits
Serve = Callable[..., Any]  # `serve`, or the fixture of this name


def next_token(history: list[int]) -> int:
    return (sum(history) * 31 + len(history)) % 60 + 10


def top_id(request_id: int, rank: int) -> int:
    return 10 * request_id + rank


class FakeShards:
    """A fake group of shards that answers after some turns of the event loop. `fail(step)` may raise the error of that
    step."""

    info = INFO
    epoch = INFO.epoch

    def __init__(
        self, fail: Callable[[ForwardStep], None] = lambda step: None, capacity: int = 500, keeps: bool = False
    ) -> None:
        """`keeps`: whether the slots hold what they held in the shards before."""
        self.keeps = keeps
        self.content = self.known_content = 0
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.capacity = capacity
        self.compiled: list[str] = []  # the grammars that were to be compiled before their requests are queued
        self.may_compile = asyncio.Event()
        self.may_compile.set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.refusals: dict[str, str] = {}  # why a grammar is refused
        self.poisoned: set[int] = set()  # requests whose logits are not finite
        self.completing: dict[int, int] = {}  # the token with which a request's grammar is complete, by request
        self.top_counts: dict[int, int] = {}  # number of top tokens in each answer, by request
        self.rows_left = 0  # number of rows that the shards report while no request runs
        self.wanted: tuple[int | None, ...] = ()  # the limits of the last warm-up
        self.steps: list[Step] = []
        self.histories: dict[int, list[int]] = {}
        self.prompts: dict[int, FirstChunk] = {}  # the requests that want log-probabilities of their prompts
        self.max_in_flight = 0
        self._in_flight = 0
        self._fail = fail
        self._failed = False

    async def run(self, step: Step) -> StepAnswer | None:
        assert step.number == len(self.steps) + 1, "steps are sent in their order"
        self.steps.append(step)
        self._in_flight += isinstance(step, ForwardStep)
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        answer = self._answer(step)
        await asyncio.sleep(0.002)
        await self.may_answer.wait()
        self._in_flight -= isinstance(step, ForwardStep)
        if isinstance(answer, ShardsError):
            raise answer
        return answer

    def _answer(self, step: Step) -> StepAnswer | ShardsError | None:
        """The answer, computed when the step is sent: a shard runs steps in the order they are sent."""
        if isinstance(step, ClearStep):
            self._failed = False
            self.histories.clear()
        if self._failed:
            return StepAbortedError("an earlier step failed")
        try:
            return self._compute(step)
        except ShardsError as error:
            self._failed = True
            return error

    def _compute(self, step: Step) -> StepAnswer | None:
        if isinstance(step, FilterStep):
            self.histories = {i: h for i, h in self.histories.items() if i in step.keep}
        if not isinstance(step, ForwardStep):
            return None
        self._fail(step)
        for chunk in step.chunks:
            if chunk.first:
                self.histories[chunk.request_id] = list(chunk.first.ids)
                self.prompts.pop(chunk.request_id, None)
                if chunk.first.prompt_logprobs is not None:
                    self.prompts[chunk.request_id] = chunk.first
        prompts = {c.request_id: given for c in step.chunks if (given := self._prompt_logprobs(c)) is not None}
        ids = [*step.decode_ids, *(c.request_id for c in step.chunks if c.last)]
        tokens = []
        for request_id in ids:
            tokens.append(next_token(self.histories[request_id]))
            self.histories[request_id].append(tokens[-1])
        zeros = [0.0] * len(ids)
        failures = {i: NOT_FINITE for i in ids if i in self.poisoned}
        complete = [i for i, token in zip(ids, tokens, strict=True) if token == self.completing.get(i)]
        counts = [self.top_counts.get(i, 0) for i in ids]
        tops = [top_id(i, rank) for i, count in zip(ids, counts, strict=True) for rank in range(count)]
        top_logprobs = [0.0] * len(tops)
        texts = ids, tokens, zeros, counts, tops, top_logprobs
        return StepAnswer(step.number, *texts, 1, 1, 1, True, failures, prompts, complete)

    def _prompt_logprobs(self, chunk: Chunk) -> PromptLogprobs | None:
        asked = self.prompts.get(chunk.request_id)
        if asked is None or (end := min(chunk.end, asked.prompt_length - 1)) <= chunk.start:
            return None
        value = np.nan if chunk.request_id in self.poisoned else 0.0
        logprobs = np.array(expected_logprobs(asked.ids)[chunk.start : end], np.float32) + np.float32(value)
        shape = (end - chunk.start, asked.prompt_logprobs or 0)
        return PromptLogprobs(logprobs, np.full(shape, chunk.request_id, np.int32), np.zeros(shape, np.float32))

    async def warmup(self, *wanted: int | None, content: int, known_content: int) -> WarmupAnswer:
        self.wanted, self.content, self.known_content = wanted, content, known_content
        return WarmupAnswer(self.capacity, self.capacity, self.keeps and known_content != 0)

    async def compile(self, grammar: str) -> str:
        self.compiled.append(grammar)
        await self.may_compile.wait()
        if self.lost.done():
            raise ShardsError("lost")
        return self.refusals.get(grammar, "")

    async def is_healthy(self) -> bool:
        return True

    async def views(self) -> list[ShardView]:
        return [ShardView(self.rows_left, self.capacity)]

    async def close(self) -> None:
        pass


class FakeShardGroups:
    """A fake source of shard groups, which hands out one fake group after the other."""

    def __init__(self, *groups: Callable[[], FakeShards]) -> None:
        self.made: list[FakeShards] = []
        self.events: list[str] = []
        self._groups = list(groups)

    async def next(self) -> FakeShards:
        if not self._groups:
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
        self.made.append(self._groups.pop(0)())
        return self.made[-1]

    def lost(self, group: FakeShards, reason: str) -> None:
        self.events.append(f"lost: {reason}")

    def confirmed(self, group: FakeShards) -> None:
        self.events.append("confirmed")

    def blamed(self, group: FakeShards) -> None:
        self.events.append("blamed")

    async def close(self) -> None:
        pass


class Listener:
    """A sink that records everything it receives. `on_tokens` is called with the sink after each step's tokens."""

    def __init__(self, on_tokens: "Callable[[Listener], None]" = lambda listener: None) -> None:
        self.index = 0
        self.given: list[Tokens] = []
        self.end: Ended | None = None
        self._on_tokens = on_tokens
        self._changed = asyncio.Event()

    @property
    def ids(self) -> list[int]:
        return [token_id for tokens in self.given for token_id in tokens.ids]

    def take(self, tokens: Tokens, ended: Ended | None) -> None:
        assert self.end is None, "an Ended is the last that a sink gets"
        assert tokens.ids or (ended is not None and not self.given), "only a request without tokens gets none"
        assert (tokens.first is None) == bool(self.given), "the first tokens say what the first step was"
        self.given.append(tokens)
        if ended is not None:
            self.end = ended
        self._changed.set()
        self._on_tokens(self)

    def ended(self, ended: Ended) -> None:
        assert self.end is None, "exactly one Ended for each request"
        self.end = ended
        self._changed.set()

    async def until_tokens(self, count: int = 1) -> None:
        await self._until(lambda: len(self.ids) >= count)

    async def until_end(self) -> Ended:
        await self._until(lambda: self.end is not None)
        assert self.end is not None
        return self.end

    async def failure(self) -> str:
        """The cause of the failure that ends the request."""
        end = await self.until_end()
        assert end.reason is EndReason.FAILED, end
        return end.cause

    async def all_ids(self) -> list[int]:
        """All tokens of a request that ends at its length limit."""
        end = await self.until_end()
        assert end.reason is EndReason.LENGTH, end
        return self.ids

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()


class World:
    """An engine and its shard groups, one after the other; by default a single group that never fails."""

    def __init__(self, *groups: Callable[[], FakeShards], **limits: int) -> None:
        self.groups = FakeShardGroups(*(groups or (FakeShards,)))
        self.metrics = Metrics()
        config = EngineConfig(
            TokenFlags(max_batch_prefill_tokens=64),
            SchedulingFlags(
                max_queued_tokens=limits.get("max_queued_tokens"),
                max_batch_size=limits.get("max_batch_size"),
                prefix_caching=bool(limits.get("prefix_caching", True)),
            ),
            max_concurrent_requests=limits.get("max_rows", 16),
        )
        self.engine = LocalEngine(self.groups, config, self.metrics)  # type: ignore[arg-type]
        self.client: EngineRun = self.engine  # what the tests' sinks are given to

    def ask(
        self,
        ids: list[int],
        count: int,
        timeout_s: float | None = None,
        credits: int = MANY,
        on_tokens: Callable[[Listener], None] = lambda listener: None,
        prompt_logprobs: int | None = None,
        past: Past = NEW,
        grammar: str = "",
        owner: str = "",
    ) -> Listener:
        listener = Listener(on_tokens)
        sampling, share = Sampling(grammar=grammar), Share(owner)
        request = GenerationRequest(
            tuple(ids), count, sampling, timeout_s=timeout_s, prompt_logprobs=prompt_logprobs, share=share
        )
        if past is NEW:
            [listener.index] = self.client.submit_all([request], [listener], credits).indexes
        else:
            listener.index = self.engine.submit(request, listener, credits, past)
        return listener

    def ask_all(self, requests: int, count: int) -> list[Listener]:
        """Requests with the prompts `prompt(0)`, `prompt(1)` …"""
        return [self.ask(prompt(i), count) for i in range(requests)]

    @property
    def forward_steps(self) -> list[ForwardStep]:
        """The forward steps that the newest shards received."""
        return [step for step in self.groups.made[-1].steps if isinstance(step, ForwardStep)]


LIMIT_S = 60.0
WAYS = ("in its process", "behind gRPC")
# Runs a test with the sinks of its `world` in the engine's process, and again with sinks behind gRPC.
both_ways = pytest.mark.parametrize("world", WAYS, indirect=True)


@asynccontextmanager
async def in_process(world: World) -> AsyncIterator[EngineRun]:
    yield world.engine


@asynccontextmanager
async def served(
    *groups: Callable[[], FakeShards],
    front: Callable[[World], AbstractAsyncContextManager[EngineRun]] = in_process,
    **limits: int,
) -> AsyncIterator[World]:
    """A running engine. At the end all slots must be free again. `front`: what sinks are given to."""
    world = World(*groups, **limits)
    await world.engine.start()
    try:
        async with front(world) as world.client:
            async with asyncio.timeout(LIMIT_S):
                yield world
            scheduler = world.engine._scheduler
            async with asyncio.timeout(LIMIT_S):  # until all slots come back
                while scheduler.memory.num_held or scheduler.books() is not None:
                    await asyncio.sleep(0.002)
    finally:
        await world.engine.close()


def serve(use: Callable[[World], Awaitable[None]], *groups: Callable[[], FakeShards], **options: Any) -> None:
    """Runs `use` within `served`."""

    async def run() -> None:
        async with served(*groups, **options) as world:
            await use(world)

    asyncio.run(run())


async def all_ids(listeners: list[Listener]) -> list[list[int]]:
    return await asyncio.gather(*(listener.all_ids() for listener in listeners))


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


def expected_logprobs(ids: Sequence[int]) -> list[float]:
    """The log-probabilities of all tokens of a prompt but the first."""
    return [-float(next_token(list(ids[:i]))) for i in range(1, len(ids))]


def prompt(i: int) -> list[int]:
    return [i + 1] * (i + 3)


def fails(fail: Callable[[ForwardStep], None]) -> Callable[[], FakeShards]:
    return lambda: FakeShards(fail)


def dies_at(step_number: int, failed_ids: set[int] | None = None) -> Callable[[], FakeShards]:
    """Shards that are lost at step `step_number` and later. With `failed_ids`, they are lost at the first such step
    that carries one of these requests."""

    def fail(step: ForwardStep) -> None:
        if step.number >= step_number and (failed_ids is None or failed_ids & set(step.request_ids)):
            raise ShardsError("connection reset")

    return fails(fail)
