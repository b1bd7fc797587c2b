"""Requests from `submit` to their end: each sink receives its tokens, and then exactly one Ended."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from text_generation_common.logs import request_id
from text_generation_router.engine.deadlines import Deadlines
from text_generation_router.engine.protocol import Ended, FirstStep, Sink, Tokens, TopToken
from text_generation_router.engine.step_metrics import StepMetrics
from text_generation_router.scheduling.blame import MAX_COUNTS, MAX_LOSSES
from text_generation_router.scheduling.costs import SINGLE_QUERIES, QueryBlocks
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
class OpenRequest:
    """A request that has not ended. Times are those of time.perf_counter."""

    running: Running
    sink: Sink
    credits: int  # number of tokens that the sink may still get
    queued_s: float
    begun_s: float = 0.0  # time at which the request's first step was sent; 0 before
    tokens_s: float = 0.0  # time at which the request's newest tokens came; 0 before
    on_begun: Callable[[], None] | None = None  # called when the request's first step is decided
    id_in_logs: str = field(default_factory=request_id.get)  # the HTTP request's
    lost_s: float = 0.0  # time at which the shards with its row were lost; 0 unless it waits to be sent again
    replays: tuple[tuple[float, float], ...] = ()  # as in `Ended`

    def inference_s(self, now: float) -> float:
        return now - self.begun_s if self.begun_s else 0.0

    def ended(self, reason: EndReason, inference_s: float, cause: str = "") -> Ended:
        queue_s = self.begun_s - self.queued_s if self.begun_s else None
        if self.lost_s:
            self.note_replay(self.begun_s + inference_s)
        blame = self.running.blame
        return Ended(
            reason=reason,
            inference_s=inference_s,
            cause=cause,
            queue_s=queue_s,
            replays=self.replays,
            suspicions=blame.suspicions,
            counts=blame.counts,
        )

    def note_replay(self, until: float) -> None:
        self.replays += ((self.lost_s - self.begun_s, until - self.begun_s),)
        self.lost_s = 0.0

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
        self._open: dict[int, OpenRequest] = {}
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
        self._open[running.id] = OpenRequest(running, sink, credits, now, on_begun=on_begun)
        self._deadlines.set(running.id, request.timeout_s)
        self._work.set()
        return running.id

    def is_open(self, index: int) -> bool:
        return index in self._open

    @property
    def num_open(self) -> int:
        return len(self._open)

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
            ended = self._end(index, request, applied.ended[index], tokens) if index in applied.ended else None
            request.credits -= len(ids) + (sum(map(len, tokens.tops)) if tops else 0)
            self._give(index, request, tokens, ended)
            if request.credits <= 0:
                request.running.paused = True
        self._counts.waited_between_tokens(gaps_s)
        for index in applied.computed:
            if (request := self._open.get(index)) is not None:
                self._forget(index)
                nothing = Tokens((), (), (), request.inference_s(now), request.first_step)
                self._give(index, request, nothing, request.ended(EndReason.LENGTH, nothing.inference_s))

    def _give(self, index: int, request: OpenRequest, tokens: Tokens, ended: Ended | None) -> None:
        try:
            request.sink.take(tokens, ended)
        except Exception as error:
            self._fail(index, request, ended, error)

    def _end(self, index: int, request: OpenRequest, reason: EndReason, last: Tokens) -> Ended:
        """Ends a request that the scheduler has ended with the tokens `last`."""
        self._forget(index)
        self._counts.finished(request.running)
        return request.ended(reason, last.inference_s)

    def _fail(self, index: int, request: OpenRequest, ended: Ended | None, error: Exception) -> None:
        """Ends a request whose sink raised `error` when it received tokens. `ended` is given if they were the last
        tokens.
        """
        logger.error(
            "the sink of request %d raised an error, so the request fails", index, exc_info=error, extra=_about(request)
        )
        cause = f"Server error: {type(error).__name__}"
        if ended is None:
            self._end_early(index, EndReason.FAILED, cause)
        else:
            _report_end(request, request.ended(EndReason.FAILED, ended.inference_s, cause))

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
            if request is not None and request.begun_s:
                request.lost_s = request.lost_s or now

    def begin_epoch(self, slots: int, eos_token_ids: Iterable[int], query_blocks: QueryBlocks = SINGLE_QUERIES) -> None:
        """To be called when new shards with `slots` token slots are ready: requests that do not fit into the slots
        fail.
        """
        for request in self._scheduler.begin_epoch(slots, frozenset(eos_token_ids), query_blocks):
            cause = f"Server error: the shards came back with room for {slots} tokens only"
            self._close(request.id, EndReason.FAILED, cause)

    def end_all(self, reason: EndReason, cause: str = "") -> None:
        """Ends every request because the engine has ended."""
        for index in list(self._open):
            self._close(index, reason, cause)

    def _close(self, index: int, reason: EndReason, cause: str = "") -> None:
        """Calls `ended` of the sink of a request that the scheduler has ended, unless it was called before."""
        if (request := self._forget(index)) is not None:
            _report_end(request, request.ended(reason, request.inference_s(time.perf_counter()), cause))

    def _forget(self, index: int) -> OpenRequest | None:
        self._deadlines.clear(index)
        return self._open.pop(index, None)


def _about(request: OpenRequest) -> dict[str, str]:
    """For log lines, which the engine's own task writes."""
    return {"request_id": request.id_in_logs}


def _report_end(request: OpenRequest, ended: Ended) -> None:
    try:
        request.sink.ended(ended)
    except Exception:
        index = request.running.id
        logger.exception("the sink of request %d raised an error at the request's end", index, extra=_about(request))


def _tops(answer: StepAnswer) -> list[tuple[tuple[TopToken, ...], ...]] | None:
    """The top tokens of each row of the answer; None if no row has any."""
    if not answer.top_ids:
        return None
    pairs = zip(answer.top_ids, answer.top_logprobs, strict=True)
    return [(tuple(islice(pairs, count)),) if count else () for count in answer.top_counts]
