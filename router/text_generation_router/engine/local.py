"""Drives the shards: one loop that keeps two steps in flight and turns their answers into tokens for the requests.

Shards may die at any time. Only the router knows the whole state of a request: it sends each running request to the
shards of the new epoch as a prompt of the original prompt and the tokens made so far, and the stream goes on.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from text_generation_common.flags.requests import SchedulingFlags, TokenFlags
from text_generation_router.api.generation_stream import GenerationStream
from text_generation_router.engine.audit import Audit
from text_generation_router.engine.retry_after import RetryAfter
from text_generation_router.engine.shard_groups import ShardGroups
from text_generation_router.engine.shards import ModelInfo, ShardedClient, StepAnswer
from text_generation_router.engine.step_metrics import StepMetrics
from text_generation_router.errors import (
    GenerationError,
    IncompleteGenerationError,
    OverloadedError,
    ShardsError,
    StepAbortedError,
    StepFailedError,
    ValidationError,
    WarmupRefusedError,
)
from text_generation_router.metrics import Metrics
from text_generation_router.scheduling.blame import MAX_COUNTS, MAX_LOSSES
from text_generation_router.scheduling.limits import Limits
from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import ForwardStep, Step, StepTokens
from text_generation_router.text.detokenization import Vocabulary
from text_generation_router.text.events import Token

log = logging.getLogger("text_generation_router")

# One step runs and one step waits behind it in the shard, so a shard never waits for the router.
MAX_IN_FLIGHT = 2
# Default of max_queued_tokens, in multiples of the token slots.
QUEUED_CAPACITIES = 16
# Longest deadline of a request, in seconds from its arrival; event loop timers accept no longer delay.
LATEST_DEADLINE_S = 10.0**8
# Error text of a request that is blamed for repeated losses of the shards.
LOST_TOO_OFTEN = (
    f"the shards died, or failed a step, {MAX_LOSSES} times in a row while they worked on this request, the last"
    f" {MAX_COUNTS} times on nothing else"
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The user's settings. A token limit that is None is decided by warm-up."""

    tokens: TokenFlags
    scheduling: SchedulingFlags
    max_concurrent_requests: int


@dataclass(frozen=True, slots=True)
class TokenLimits:
    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int


@dataclass(slots=True)
class StepInFlight:
    step: Step
    answer: asyncio.Task[StepAnswer | None]
    sent_s: float

    @property
    def has_answered(self) -> bool:
        """False while the shards compute the step, and after the step has failed."""
        return self.answer.done() and not self.answer.cancelled() and self.answer.exception() is None


class Engine:
    """Owns the scheduler. `submit` and `cancel` belong to the event loop's thread, like everything here.

    `info` and `limits` describe the newest epoch; they exist once `start` has returned. `failed` is done once the
    engine can generate nothing more for any request.
    """

    info: ModelInfo
    limits: TokenLimits

    def __init__(
        self,
        shard_groups: ShardGroups,
        config: EngineConfig,
        make_vocabulary: Callable[[ModelInfo], Vocabulary],
        metrics: Metrics,
    ) -> None:
        self.on_limits: Callable[[TokenLimits], None] = lambda limits: None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shard_groups = shard_groups
        self._config = config
        self._make_vocabulary = make_vocabulary
        self._metrics = metrics
        self._counts = StepMetrics(metrics)
        self._audit = Audit(metrics)
        self._scheduler = Scheduler(
            Limits(0, config.max_concurrent_requests, config.tokens.prefill_budget, config.scheduling)
        )
        self._retry_after = RetryAfter(self._scheduler.steps_until_start)
        self._shards: ShardedClient | None = None  # None while no shards are ready
        self._confirmed = False  # whether this epoch has answered a forward step
        self._lost_s: float | None = None  # when the shards were lost; None while they work
        self._streams: dict[int, GenerationStream] = {}
        self._in_flight: deque[StepInFlight] = deque()
        self._forwards = 0  # number of forward steps in `_in_flight`
        self._work = asyncio.Event()
        self._started = asyncio.Event()
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the first shards are ready. ShardsError: no shards will come."""
        self._task = asyncio.create_task(self._run(), name="engine")
        ready = asyncio.create_task(self._started.wait())
        try:
            await asyncio.wait([self._task, ready], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._task.done():
            self._task.result()

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Queues a validated request. ValidationError: the request does not fit the current shards. OverloadedError:
        too many prompt tokens wait already, and its own share has its part of them. IncompleteGenerationError: the
        engine has ended."""
        if self._ended:
            raise IncompleteGenerationError
        if len(request.input_ids) + request.max_new_tokens > self.limits.max_batch_total_tokens:
            raise ValidationError(
                f"`inputs` tokens + `max_new_tokens` must be <= {self.limits.max_batch_total_tokens}. Given:"
                f" {len(request.input_ids)} `inputs` tokens and {request.max_new_tokens} `max_new_tokens`"
            )
        if not self._scheduler.queue.has_room(request.share, len(request.input_ids), self._max_queued_tokens):
            raise OverloadedError(self.retry_after_s())
        running = self._scheduler.add(request)
        stream = GenerationStream(running, self._vocabulary, self._cancel, self._work.set)
        self._streams[running.id] = stream
        if request.timeout_s is not None:
            delay_s = min(request.timeout_s, LATEST_DEADLINE_S)
            stream.end_at(asyncio.get_running_loop().call_later(delay_s, self._expire, stream))
        self._counts.waiting(self._scheduler)
        self._work.set()
        return stream

    @property
    def _max_queued_tokens(self) -> int:
        return self._config.scheduling.max_queued_tokens or QUEUED_CAPACITIES * self.limits.max_batch_total_tokens

    def retry_after_s(self) -> int:
        """Forecast in seconds: when a request that is refused now would have started."""
        return self._retry_after.seconds(time.perf_counter())

    async def is_healthy(self) -> bool:
        return self._shards is not None and await self._shards.is_healthy()

    async def close(self) -> None:
        """Stops at once: every unfinished stream fails with IncompleteGenerationError. May be called again."""
        self._ended = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._drop_in_flight()
        await self._audit.close()
        for stream in self._streams.values():
            stream.fail(IncompleteGenerationError())
        self._streams.clear()
        if self._shards is not None:
            await self._shards.close()
            self._shards = None
        await self._shard_groups.close()

    async def _drop_in_flight(self) -> None:
        answers = [sent.answer for sent in self._in_flight]
        self._in_flight.clear()
        self._forwards = 0
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    def _cancel(self, request: Running, reason: str) -> None:
        """Ends a request whose client left, or that has to make room. `reason`: its `err` in tgi_request_failure."""
        if self._streams.pop(request.id, None) is not None:
            self._metrics.request_failure.labels(err=reason).inc()
            self._scheduler.cancel(request.id)
            self._counts.waiting(self._scheduler)
            self._work.set()

    def _expire(self, stream: GenerationStream) -> None:
        """Ends a request at its deadline, with the text made so far."""
        del self._streams[stream.running.id]
        if not stream.expire(time.perf_counter()):
            self._metrics.request_failure.labels(err="deadline").inc()
        self._scheduler.cancel(stream.running.id)
        self._counts.waiting(self._scheduler)
        self._work.set()

    async def _run(self) -> None:
        try:
            while True:
                shards = await self._shard_groups.next()
                try:
                    await self._warm_up(shards)
                    await self._drive(shards)
                except ShardsError as error:
                    if isinstance(error, WarmupRefusedError) and not self._started.is_set():
                        raise
                    await self._lose(shards, str(error))
        except Exception as error:
            if not self._started.is_set():
                raise  # `start` raises it again
            if isinstance(error, ShardsError):
                log.error("%s", error)
            else:
                log.exception("the engine failed")
            self._fail_all(f"Server error: {error if isinstance(error, ShardsError) else type(error).__name__}")
            self.failed.set_result(None)

    async def _warm_up(self, shards: ShardedClient) -> None:
        config = self._config
        log.info("Warming up model")
        capacity = await shards.warmup(
            config.tokens.prefill_budget,
            config.tokens.max_total_tokens,
            config.max_concurrent_requests,
            config.tokens.max_batch_total_tokens,
        )
        log.info("Setting max batch total tokens to %d", capacity.slots)
        max_total = config.tokens.max_total_tokens or capacity.max_total_tokens
        self.info = shards.info
        self.limits = TokenLimits(config.tokens.max_input_tokens or max_total - 1, max_total, capacity.slots)
        self._vocabulary = self._make_vocabulary(shards.info)
        self._metrics.batch_max_total_tokens.set(capacity.slots)
        for request in self._scheduler.begin_epoch(capacity.slots, self._vocabulary.eos_ids):
            self._fail(request, f"Server error: the shards came back with room for {capacity.slots} tokens only")
        self._confirmed = False
        if self._lost_s is not None:
            self._metrics.shard_recovery_duration.observe(time.perf_counter() - self._lost_s)
            self._lost_s = None
        self._shards = shards
        self.on_limits(self.limits)
        self._started.set()

    async def _drive(self, shards: ShardedClient) -> None:
        """Sends steps until the shards are lost, then raises ShardsError."""
        stepping = asyncio.create_task(self._step_for_ever(), name="steps")
        try:
            ends: list[asyncio.Future[Any]] = [stepping, shards.lost]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stepping.done():
                stepping.result()
            raise ShardsError(shards.lost.result())
        finally:
            stepping.cancel()
            await asyncio.gather(stepping, return_exceptions=True)

    async def _step_for_ever(self) -> None:
        while True:
            while self._forwards < MAX_IN_FLIGHT and (step := self._scheduler.next_step()):
                self._send(step)  # decided without knowing the tokens of the step before it
            if self._in_flight:
                await self._receive()
            else:
                self._rest()
                await self._work.wait()
            self._work.clear()

    async def _lose(self, shards: ShardedClient, reason: str) -> None:
        """Ends a lost group and its rows: all running requests go back to the queue and wait for the next group."""
        log.error("shards of epoch %d are lost: %s", shards.epoch, reason)
        while self._in_flight and self._in_flight[0].has_answered:
            await self._receive()  # answers from before the loss count
        self._shards = None
        self._metrics.shard_losses.inc()
        self._lost_s = self._lost_s or time.perf_counter()
        self._shard_groups.lost(shards, reason)
        unanswered = [sent.step for sent in self._in_flight]
        await self._drop_in_flight()
        await shards.close()
        if self._put_back(unanswered, reason):
            self._shard_groups.blamed(shards)

    def _send(self, step: Step) -> None:
        assert self._shards is not None
        now = time.perf_counter()
        self._in_flight.append(StepInFlight(step, asyncio.create_task(self._shards.run(step)), now))
        if isinstance(step, ForwardStep):
            self._forwards += 1
            self._counts.sent(step, self._scheduler)
            for chunk in step.chunks:
                if chunk.first and (stream := self._streams.get(chunk.request_id)) and stream.begin(now):
                    self._counts.began(stream.running, stream.queue_s)

    async def _receive(self) -> None:
        """Waits for the answer of the oldest step in flight and applies it."""
        oldest = self._in_flight[0]  # an unanswered step stays in the queue, where `_lose` finds it
        try:
            answer = await oldest.answer
        except StepFailedError as error:
            await self._start_again(oldest.step, str(error))
            return
        self._in_flight.popleft()
        if isinstance(oldest.step, ForwardStep):
            self._forwards -= 1
            self._note_confirmed()
        received = time.perf_counter()
        if answer is not None and isinstance(oldest.step, ForwardStep):
            self._take_tokens(answer, received)
            self._counts.answered(oldest.step, answer, oldest.sent_s, received)
            self._retry_after.note_step(oldest.sent_s, received)
        else:
            self._scheduler.apply(StepTokens(oldest.step.number))
            self._counts.filtered(oldest.sent_s, received)

    def _take_tokens(self, answer: StepAnswer, now: float) -> None:
        applied = self._scheduler.apply(
            StepTokens(answer.number, answer.request_ids, list(zip(answer.token_ids)), answer.not_finite_ids)
        )
        for request_id in applied.not_finite:
            self._fail(self._streams[request_id].running, "the model's logits for it are not finite (NaN or infinity)")
        first_top = 0
        gaps_s: Counter[float] = Counter()  # time since a stream's previous token: number of streams
        logprobs = answer.logprobs.tolist()
        for i, request_id in enumerate(answer.request_ids):
            tops, first_top = slice(first_top, first_top + answer.top_counts[i]), first_top + answer.top_counts[i]
            if not applied.taken[i]:
                continue  # the request ended while this step was in flight, or its logits are not finite
            stream = self._streams[request_id]
            top_tokens = self._top_tokens(answer, tops) if tops.stop > tops.start else ()
            if stream.last_token_s:
                gaps_s[now - stream.last_token_s] += 1
            if stream.push(answer.token_ids[i], logprobs[i], top_tokens, applied.ended.get(request_id), now):
                del self._streams[request_id]
                self._scheduler.end(request_id)
                self._counts.finished(stream.running)
        self._counts.waited_between_tokens(gaps_s)

    def _note_confirmed(self) -> None:
        """Tells the shard groups, once per epoch, that a forward step of these shards has answered."""
        if not self._confirmed and self._shards is not None:
            self._confirmed = True
            self._shard_groups.confirmed(self._shards)

    def _top_tokens(self, answer: StepAnswer, rows: slice) -> tuple[Token, ...]:
        pairs = zip(answer.top_ids[rows], answer.top_logprobs[rows].tolist(), strict=True)
        vocabulary = self._vocabulary
        return tuple(Token(i, vocabulary.text_of(i), logprob, i in vocabulary.special_ids) for i, logprob in pairs)

    async def _start_again(self, failed: Step, reason: str) -> None:
        """Restarts all running requests: step `failed` raised in a shard, and no later step was run. Only the requests
        of step `failed` can be blamed."""
        log.error("%s: starting all running requests again", reason)
        if isinstance(failed, ForwardStep):
            self._counts.failed(failed)
        while len(self._in_flight) > 1:
            with suppress(StepAbortedError, StepFailedError):
                await self._in_flight[1].answer
            del self._in_flight[1]
        self._in_flight.clear()
        self._forwards = 0
        self._put_back([failed], reason)
        self._send(self._scheduler.clear())

    def _put_back(self, unanswered: Iterable[Step], reason: str) -> int:
        """Puts running requests back into the queue. Returns how many ended because they are blamed for the loss."""
        running = self._scheduler.active.num_running
        given_up = self._scheduler.put_back([step for step in unanswered if isinstance(step, ForwardStep)])
        for request in given_up:
            self._fail(request, f"Server error: {LOST_TOO_OFTEN}: {reason}")
        self._metrics.request_resumes.inc(running - len(given_up))
        self._counts.waiting(self._scheduler)
        return len(given_up)

    def _fail(self, request: Running, reason: str) -> None:
        """Tells the client of a request that the scheduler has ended."""
        self._metrics.request_failure.labels(err="generation").inc()
        self._streams.pop(request.id).fail(GenerationError(reason))

    def _fail_all(self, reason: str) -> None:
        self._ended, self._shards = True, None
        for stream in list(self._streams.values()):
            self._fail(stream.running, reason)

    def _rest(self) -> None:
        self._counts.resting(self._scheduler)
        if self._scheduler.is_idle and self._shards is not None:
            self._audit.note_idle(self._scheduler, self._shards)
