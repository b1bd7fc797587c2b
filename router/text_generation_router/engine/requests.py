"""Requests from `submit` to their end: each sink receives its tokens, and then exactly one Ended."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from text_generation_router.engine.open_request import Deadlines, OpenRequest
from text_generation_router.engine.protocol import Ended, FirstStep, Sink, Tokens, TopToken
from text_generation_router.engine.step_metrics import StepMetrics
from text_generation_router.scheduling.adapter_slots import NO_ADAPTERS, AdapterRoom
from text_generation_router.scheduling.blame import MAX_COUNTS, MAX_LOSSES
from text_generation_router.scheduling.costs import SINGLE_QUERIES, QueryBlocks
from text_generation_router.scheduling.memory.computed import ComputedHistory
from text_generation_router.scheduling.request import EndReason, GenerationRequest, Past
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import Applied, ForwardStep, StepAnswer

logger = logging.getLogger("text_generation_router")

# Error texts for clients whose request failed.
LOST_TOO_OFTEN = (
    f"the shards died, or failed a step, {MAX_LOSSES} times in a row while they worked on this request, the last"
    f" {MAX_COUNTS} times on nothing else"
)


@dataclass(slots=True, eq=False)
class LocalRequest(OpenRequest):
    """A request of this engine. Times are those of time.perf_counter."""

    running: Running
    queued_s: float
    on_begun: Callable[[], None] | None  # called when the request's first step is decided
    tokens_s: float = 0.0  # time at which the request's newest tokens came; 0 before

    def ended(self, reason: EndReason, now: float, cause: str = "") -> Ended:
        blame = self.running.blame
        ended = Ended(reason, cause=cause, suspicions=blame.suspicions, counts=blame.counts)
        return self.timed(ended, self.queued_s, now)

    @property
    def first_step(self) -> FirstStep:
        known = self.running.prompt_logprobs
        prompt_logprobs = known.joined() if known is not None else None
        return FirstStep(self.begun_s - self.queued_s, self.running.cached_tokens, prompt_logprobs)


class Requests:
    def __init__(self, scheduler: Scheduler, counts: StepMetrics, work: asyncio.Event) -> None:
        """`work` is set when a request that arrives, ends or goes on may change what the next step is."""
        self._scheduler = scheduler
        self._counts = counts
        self._work = work
        self._open: dict[int, LocalRequest] = {}
        self._deadlines = Deadlines(lambda index: self._end_early(index, EndReason.DEADLINE))

    def add(
        self,
        request: GenerationRequest,
        sink: Sink,
        credits: int,
        past: Past,
        is_ready: bool = True,
        on_begun: Callable[[], None] | None = None,
    ) -> int:
        """Returns the request's index. A request that is not ready is queued by `make_ready`."""
        now = time.perf_counter()
        running = (self._scheduler.add if is_ready else self._scheduler.add_unready)(request, past, now)
        self._open[running.id] = LocalRequest(
            index=running.id,
            request=request,
            sink=sink,
            credits=credits,
            running=running,
            queued_s=now,
            on_begun=on_begun,
        )
        self._deadlines.set(running.id, request.timeout_s)
        self._work.set()
        return running.id

    def is_open(self, index: int) -> bool:
        return index in self._open

    @property
    def num_open(self) -> int:
        return len(self._open)

    def num_with(self, adapter: str) -> int:
        """Number of open requests of a LoRA adapter."""
        return sum(request.request.adapter == adapter for request in self._open.values())

    def make_ready(self, index: int) -> None:
        self._scheduler.make_ready(index)
        self._work.set()

    def fail(self, index: int, cause: str) -> None:
        self._end_early(index, EndReason.FAILED, cause)

    def complete(self, index: int, num_tokens: int) -> None:
        """Ends a request whose text is complete with its first `num_tokens` output tokens."""
        if (request := self._open.get(index)) is not None:
            self._scheduler.end(index, num_tokens)
            self._counts.finished(request.running)
            self._close(index, EndReason.STOPPED)
            self._work.set()

    def cancel(self, index: int) -> None:
        self._end_early(index, EndReason.CANCELLED)

    def withdraw(self, index: int, even_begun: bool = False) -> None:
        """Ends a request that has not joined a step, or also one that has."""
        request = self._open.get(index)
        if request is not None and (even_begun or not request.running.has_begun):
            self._end_early(index, EndReason.WITHDRAWN)

    def _end_early(self, index: int, reason: EndReason, cause: str = "") -> None:
        if index in self._open:
            self._scheduler.cancel(index)
            self._close(index, reason, cause)
            self._work.set()

    def credit(self, index: int, tokens: int) -> None:
        if (request := self._open.get(index)) is not None:
            request.credits += tokens
            if request.running.paused and request.credits > 0:
                request.running.paused = False
                self._work.set()

    def has_begun(self, index: int) -> bool:
        request = self._open.get(index)
        return request is not None and (request.running.has_begun or request.running.past.has_run)

    def begin(self, step: ForwardStep, now: float) -> None:
        """Notes that `step` is sent now. Requests that join it again after a preemption or a loss have begun before."""
        for chunk in step.chunks:
            request = self._open.get(chunk.request_id) if chunk.first else None
            if request is not None and not request.begun_s:
                request.begun_s = now
                if request.on_begun is not None:
                    request.on_begun()
                self._counts.began(request.running, now - request.queued_s)
            elif request is not None and request.lost_s:
                request.note_replay(now)

    def publish(self, answer: StepAnswer, applied: Applied, now: float) -> None:
        """Gives the tokens of a step to the sinks. `applied`: what the scheduler has made of the answer."""
        for index, cause in applied.failed.items():
            self._close(index, EndReason.FAILED, cause)
        gaps_s: dict[float, int] = {}  # time since a request's previous tokens: number of requests
        tops = _tops(answer)
        for i, (index, ids, logprob) in enumerate(zip(answer.request_ids, applied.taken, answer.logprobs, strict=True)):
            request = self._open.get(index)
            if not ids or request is None:
                continue  # the request ended while this step was in flight, or it failed in this step
            first = None
            if request.tokens_s:
                gap_s = now - request.tokens_s
                gaps_s[gap_s] = gaps_s.get(gap_s, 0) + 1
            else:
                first = request.first_step
            request.tokens_s = now
            tokens = Tokens(ids, (logprob,), tops[i] if tops else (), now - request.begun_s, first)
            ended = self._end(request, applied.ended[index], now) if index in applied.ended else None
            request.credits -= len(ids) + (sum(map(len, tokens.tops)) if tops else 0)
            if cause := request.give(tokens, ended):
                self.fail(index, cause)
            if request.credits <= 0:
                request.running.paused = True
        self._counts.waited_between_tokens(gaps_s)
        for index in applied.computed:
            if (request := self._open.get(index)) is not None:
                self._forget(index)
                ended = request.ended(EndReason.LENGTH, now)
                request.give(Tokens((), (), (), ended.inference_s, request.first_step), ended)

    def _end(self, request: LocalRequest, reason: EndReason, now: float) -> Ended:
        """Ends a request that the scheduler has ended with its newest tokens."""
        self._forget(request.index)
        self._counts.finished(request.running)
        return request.ended(reason, now)

    def put_back(self, unanswered: Iterable[ForwardStep], reason: str) -> int:
        """Puts running requests back into the queue after a loss. Requests that are blamed for the loss end instead.
        Returns the number of requests that ended.
        """
        running = self._scheduler.active.num_running
        self._note_loss(time.perf_counter())
        given_up = self._scheduler.put_back(unanswered)
        for request in given_up:
            self._close(request.id, EndReason.FAILED, f"Server error: {LOST_TOO_OFTEN}: {reason}")
        self._counts.resumed(running - len(given_up))
        return len(given_up)

    def _note_loss(self, now: float) -> None:
        for index in self._scheduler.active.running:
            request = self._open.get(index)
            if request is not None:
                request.note_loss(now)

    def refuse_adapter(self, adapter: str, reason: str) -> None:
        for request in self._scheduler.refuse_adapter(adapter):
            self._close(request.id, EndReason.FAILED, f"Server error: the adapter cannot be loaded: {reason}")

    def begin_epoch(
        self,
        slots: int,
        eos_token_ids: Iterable[int],
        query_blocks: QueryBlocks = SINGLE_QUERIES,
        adapters: AdapterRoom = NO_ADAPTERS,
        has_kept_cache: bool = False,
        computed: Sequence[ComputedHistory] = (),
    ) -> None:
        """To be called when new shards with `slots` token slots are ready: requests that do not fit into the slots
        fail. `has_kept_cache`: the slots hold what they held in the epoch before. `computed`: what they hold otherwise.
        """
        if has_kept_cache and (wrong := self._scheduler.books()) is not None:
            logger.error("the books of the token slots are wrong, all tokens are computed again: %s", wrong)
            has_kept_cache = False
        given_up = self._scheduler.begin_epoch(
            slots,
            frozenset(eos_token_ids),
            query_blocks,
            adapters,
            has_kept_cache=has_kept_cache,
            computed=computed,
        )
        if computed:
            tokens = self._scheduler.memory.cache.num_tokens
            logger.info("%d tokens of %d requests of an engine before this one are cached", tokens, len(computed))
        for request in given_up:
            cause = f"Server error: the shards came back with room for {slots} tokens only"
            self._close(request.id, EndReason.FAILED, cause)

    def end_all(self, reason: EndReason, cause: str = "") -> None:
        """Ends every request because the engine has ended."""
        for index in list(self._open):
            self._close(index, reason, cause)

    def _close(self, index: int, reason: EndReason, cause: str = "") -> None:
        """Calls `ended` of the sink of a request that the scheduler has ended, unless it was called before."""
        if (request := self._forget(index)) is not None:
            request.report_end(request.ended(reason, time.perf_counter(), cause))

    def _forget(self, index: int) -> LocalRequest | None:
        self._deadlines.clear(index)
        return self._open.pop(index, None)


def _tops(answer: StepAnswer) -> list[tuple[tuple[TopToken, ...], ...]] | None:
    """The top tokens of each row of the answer; None if no row has any."""
    if not answer.top_ids:
        return None
    pairs = zip(answer.top_ids, answer.top_logprobs, strict=True)
    return [(tuple(islice(pairs, count)),) if count else () for count in answer.top_counts]
