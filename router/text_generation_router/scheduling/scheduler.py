"""Decides each step: which requests join, continue and leave, and which token slots the new tokens get.

The rules are in ARCHITECTURE.md, section 5: a step is decided without knowing the tokens of the step before it; slots
are freed when the last step that contains their request has answered; after a failed step all requests start again.

A request is in one of five states: *unready*, before it is queued; *waiting* in the queue, without a row or slots;
*running*, with a row in the shards and token slots; *leaving*, ended or preempted but still with slots, because an
unanswered step carries it; *gone*.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from text_generation_common.errors import NOT_FINITE
from text_generation_router.scheduling.adapter_slots import NO_ADAPTERS, AdapterRoom, AdapterSlots
from text_generation_router.scheduling.admission import AdmissionControl
from text_generation_router.scheduling.blame import EVER, Blame, reaches
from text_generation_router.scheduling.chunks import next_chunks
from text_generation_router.scheduling.costs import SINGLE_QUERIES, ChunkBudget, LearnedCosts, QueryBlocks, StepCosts
from text_generation_router.scheduling.joining import Joining
from text_generation_router.scheduling.look_ahead import steps_until_start
from text_generation_router.scheduling.memory.computed import ComputedHistory
from text_generation_router.scheduling.memory.memory import Memory, find_error
from text_generation_router.scheduling.memory.observer import CacheObserver
from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.scheduling.queue import Queue
from text_generation_router.scheduling.request import NEW, GenerationRequest, Limits, Past
from text_generation_router.scheduling.running import (
    NO_TOKENS,
    ActiveRequests,
    Running,
    find_victim,
    num_soon_free,
    send_tokens,
)
from text_generation_router.scheduling.step import (
    AdapterStep,
    Applied,
    Chunk,
    ClearStep,
    FilterStep,
    ForwardStep,
    SentSteps,
    Step,
    StepAnswer,
)

# Seconds: the greatest age of a request. What a front says beyond it changes nothing.
OLDEST_S = 24 * 3600.0


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the router started. All are numbers of tokens, except `preemptions`."""

    preemptions: int = 0
    recomputed_tokens: int = 0  # number of tokens prefilled again after a preemption or a loss of the shards
    prefix_hit_tokens: int = 0  # number of prompt tokens found in the prefix cache
    prefilled_tokens: int = 0  # number of tokens in the chunks that were sent


class Scheduler:
    """Decides the steps of one engine. `queue`, `active`, `steps`, `memory`, `adapters` and `joining` may be read from
    outside; the last four are replaced in each epoch.
    """

    steps: SentSteps
    memory: Memory
    adapters: AdapterSlots
    joining: Joining

    def __init__(
        self,
        limits: Limits,
        seed: int = 0,
        end_tokens: frozenset[int] = NO_TOKENS,
        costs: StepCosts | None = None,
        cache_observer: CacheObserver | None = None,
    ) -> None:
        """`seed` seeds the random output lengths that admission draws. `end_tokens`: a request ends with any of these
        token ids, unless it ignores them. `costs`: what steps cost; None: it is learned. `cache_observer` is told which
        tokens are cached, in each epoch."""
        self.counters = SchedulerCounters()
        self.queue = Queue(limits.policy.priority_between_tenants)
        self.active = ActiveRequests()
        self._admission = AdmissionControl(limits.policy.admission, seed)
        self._budget = ChunkBudget(
            limits.max_batch_prefill_tokens, limits.policy.max_prefill_slowdown, costs or LearnedCosts()
        )
        self._cache_observer = cache_observer
        self._requests: dict[int, Running] = {}  # requests that have not ended, by id
        self._unready: dict[int, Running] = {}  # requests that are not queued yet, by id
        self._next_id = 1
        self._newest = EVER  # the last arrival of all requests
        self._num_losses = 0
        self._num_joined = 0  # number of requests that joined since the last forward step
        self._reason: str | None = None  # why the newest requests joined a running batch, in TGI's words
        self._begin(limits, end_tokens)

    def _begin(
        self,
        limits: Limits,
        end_tokens: frozenset[int],
        adapters: AdapterRoom = NO_ADAPTERS,
        memory: Memory | None = None,
    ) -> None:
        self.limits = limits
        # Service of other engines puts a tenant behind the others here by a time that the engine's size sets.
        self.queue.limit_lead(limits.capacity)
        self._end_tokens = end_tokens
        self.steps = SentSteps()
        self.memory = memory or Memory(limits.capacity, limits.policy.prefix_caching, self._cache_observer)
        self.adapters = AdapterSlots(adapters)
        self.queue.admits = self.adapters.admits
        self.joining = Joining(limits, self.memory, self.queue, self._admission, self._budget)

    def observe_cache(self, observer: CacheObserver | None) -> None:
        """From now on `observer` is told which tokens are cached, in this epoch and in later ones. None: no one is."""
        self._cache_observer = observer
        self.memory.cache.observe(observer)

    def begin_epoch(
        self,
        capacity: int,
        end_tokens: frozenset[int] = NO_TOKENS,
        query_blocks: QueryBlocks = SINGLE_QUERIES,
        adapters: AdapterRoom = NO_ADAPTERS,
        has_kept_cache: bool = False,
        computed: Sequence[ComputedHistory] = (),
    ) -> list[Running]:
        """Starts with new shards of `capacity` token slots, whose model ends texts with `end_tokens`, whose attention
        computes chunks in `query_blocks`, and which have `adapters`. All requests must be waiting (see `put_back`).
        `has_kept_cache`: the slots hold what the answered steps of the epoch before have written, so what is cached
        stays cached. No slot that an unanswered step wrote is cached. `computed`: what the slots hold otherwise.

        Ends and returns the waiting requests that do not fit into the new capacity.
        """
        assert not self.active, "rows of the last epoch"
        self._budget.begin_epoch(query_blocks)
        memory = self.memory if has_kept_cache and capacity == self.memory.capacity else None
        self._begin(replace(self.limits, capacity=capacity), end_tokens, adapters, memory)
        if memory is None:
            self.memory.take_over(computed)
        self.queue.put_streams_first([*self.queue.waiting()], self._is_kept)
        waiting = (*self.queue.waiting(), *self._unready.values())
        given_up = [request for request in waiting if request.max_slots > capacity]
        for request in given_up:
            self._end(request)
        return given_up

    def _is_kept(self, request: Running) -> bool:
        return bool(request.output_ids) and self.memory.cached_length_now(request) == request.num_tokens - 1

    @property
    def is_idle(self) -> bool:
        return not (self.queue or self.active)

    def steps_until_start(self) -> float:
        """Forecast: number of steps after which a request that arrives now starts, if it waits behind all others."""
        running = self._admission.stays(list(self.active.running.values()))
        waiting = self._admission.stays(list(self.queue.waiting()))
        limits = self.limits
        return steps_until_start(running, waiting, limits.capacity, limits.max_running, self._budget.newest)

    def books(self) -> str | None:
        """Checks the accounts of the token slots. Returns an error, or None."""
        return find_error(self.memory, list(self.active))

    def add(self, request: GenerationRequest, past: Past = NEW, now_s: float = 0.0) -> Running:
        """Queues a request that validation found to fit the limits. `now_s`: seconds of a clock that never goes back;
        without it, requests are ordered as they are submitted."""
        running = self.add_unready(request, past, now_s)
        self.make_ready(running.id)
        return running

    def add_unready(self, request: GenerationRequest, past: Past = NEW, now_s: float = 0.0) -> Running:
        """Takes a request as `add` does. `make_ready` queues it."""
        running = Running(self._next_id, request, past, now_s - min(past.age_s, OLDEST_S))
        running.blame = Blame.of(past, self._newest)
        self._newest = max(self._newest, running.arrival)
        assert not past.output_ids or len(past.output_ids) < request.max_new_tokens, "nothing is left to do"
        assert running.max_slots <= self.limits.capacity, "validation lets through what can never fit"
        self._next_id += 1
        self._requests[running.id] = self._unready[running.id] = running
        return running

    def make_ready(self, request_id: int) -> None:
        """Queues an unready request. No effect if the request has ended, or is queued."""
        if (running := self._unready.pop(request_id, None)) is None:
            return
        self.queue.append(running)
        self.queue.put_streams_first([running], self._is_kept)
        if not running.tenant.num_running:
            self.joining.times.retry_now()

    def end(self, request_id: int, num_tokens: int) -> None:
        """Ends a request that is complete with its first `num_tokens` output tokens, because its text has reached a
        stop string there. No effect if the request has ended.
        """
        if (request := self._requests.get(request_id)) is not None:
            if request.holding is not None:  # the queue has counted the tokens of a request that waits
                request.keep_output(num_tokens)
            self._admission.learn(min(num_tokens, len(request.output_ids)))
            self._end(request)

    def cancel(self, request_id: int) -> None:
        """Ends a request that is not complete, because its client left or its time ran out. No effect if the request
        has ended.
        """
        if (request := self._requests.get(request_id)) is not None:
            self._end(request)

    def _complete(self, request: Running) -> None:
        self._admission.learn(len(request.output_ids))
        self._end(request)

    def _end(self, request: Running) -> None:
        request.ended = True
        del self._requests[request.id]
        if request.id in self.active.running:
            self._leave(request)
        elif self._unready.pop(request.id, None) is None and request.holding is None:
            self.queue.remove(request)
            self.memory.forget_match(request)

    def next_step(self) -> Step | None:
        """The next call to the shards. None: nothing can be sent before a step answers or a request arrives."""
        if not self.active.have_departed_rows:
            self._join()
        if self.active.have_departed_rows:
            return FilterStep(self.steps.next_number(), self.active.drop_rows())
        if load := self.adapters.next_load():
            return AdapterStep(self.steps.next_number(), *load)
        return self._forward()

    def _join(self) -> None:
        if self.active.suspect is None:
            running, now = list(self.active.running.values()), self.joining.times.num_forwards
            for request in self.adapters.choose(self.queue.waiting(), running, now):
                self._preempt(request)
        if self.active.have_departed_rows:
            return  # no request joins before the rows are dropped
        joins = self.joining.choose(self.active)
        for request in joins.joined:
            if request.max_computed:
                again = min(request.max_computed, request.prefill_to) - request.prefilled
                self.counters.recomputed_tokens += max(0, again)
            else:
                self.counters.prefix_hit_tokens += request.prefilled
            self.active.join(request)
            self.adapters.join(request)
            self._num_joined, self._reason = self._num_joined + 1, joins.reason
        for request in joins.preempted:
            self._preempt(request)

    def _forward(self) -> ForwardStep | None:
        suspect = self.active.suspect
        if suspect is not None and self.steps.carry_any_but(suspect.id):
            return None
        running = self.active.running.values() if suspect is None else [suspect]
        prefilling = [request for request in running if request.prefilled < request.prefill_to]
        # A suspect makes one token alone. Its second token is not sent before the first is confirmed, because after
        # that the other requests may run again.
        streams = [r for r in running if r.wants_token] if suspect is None else []
        decoding = [] if self._budget.leaves_out(streams, prefilling) else self._with_room(streams)
        # `_with_room` may have preempted some of these requests.
        prefilling = [request for request in prefilling if request.id in self.active.running]
        if not (prefilling or decoding):
            return None
        number = self.steps.next_number()
        chunks = self._chunks(number, prefilling, decoding, len(streams)) if prefilling else ()
        self._budget.note_sent(number, decoding, chunks)
        slots = self.memory.take_one_each(decoding)
        send_tokens(decoding, 1, number)
        self.joining.times.note_forward(1, decodes=bool(decoding))
        joined, self._num_joined = self._num_joined, 0
        step = ForwardStep(
            number=number,
            decode_ids=tuple([request.id for request in decoding]),
            decode_slots=slots,
            chunks=chunks,
            joined=joined,
            concat_reason=self._reason if joined else None,
        )
        self.steps.send(step)
        return step

    def _chunks(
        self, number: int, prefilling: list[Running], decoding: list[Running], num_streams: int
    ) -> tuple[Chunk, ...]:
        """The chunks of a step. Streams that start again with one token have one each, and do not wait for prompts:
        where they are more than the `num_streams` that run already, as after a loss, the step computes no prompt.
        Otherwise prompts share what the budget allows beside them."""
        limit = self.limits.max_batch_prefill_tokens
        due = [request for request in prefilling if request.is_due][:limit]
        chunks = tuple([request.send_chunk(1, number) for request in due])
        if len(due) <= num_streams:
            prompts = [request for request in prefilling if not request.is_due]
            budget = min(self._budget.choose([*decoding, *due], prompts), limit - len(due))
            chunks += next_chunks(prompts, budget, self.joining.parts.most(self.joining.times.num_forwards), number)
        self.counters.prefilled_tokens += sum(chunk.end - chunk.start for chunk in chunks)
        return chunks

    def _with_room(self, decoding: list[Running]) -> list[Running]:
        """The requests of `decoding` that get a slot for their next token. If the slots that leaving and ending
        requests will free are not enough for the others, running requests are preempted until the remaining ones fit.
        """
        while (missing := len(decoding) - self.memory.num_available) > 0:
            victim = find_victim(self.active, self.memory)
            if num_soon_free(self.active, self.memory) >= missing or victim is None:
                return decoding[:-missing]
            self._preempt(victim)
            decoding = [request for request in decoding if request is not victim]
        return decoding

    def _preempt(self, request: Running) -> None:
        """Takes the request's row and slots away. The request joins again, with all its tokens, when there is room."""
        self.counters.preemptions += 1
        self._leave(request)

    def _leave(self, request: Running) -> None:
        self.queue.stop(request)
        self.adapters.leave(request)
        self._admission.leave(request)
        if not self.active.leave(request, self.steps.answered):
            self._release(request)

    def _release(self, request: Running) -> None:
        """Frees the slots of a request. No unanswered step may carry the request."""
        before = self.memory.num_available
        self.memory.release(request)
        self.joining.note_freed(self.memory.num_available - before)
        if not request.ended:
            self.queue.put_back(request)

    def apply(self, answer: StepAnswer) -> Applied:
        """Takes the answer to the oldest step in flight. Confirms its tokens and chunks; ends requests by length, by
        end token, with their grammar complete, or because they failed; frees the slots that no later step reads.
        """
        assert len(answer.token_ids) == len(answer.request_ids), "a step sends one token and one slot for each row"
        applied = Applied()
        chunks = self.steps.note_answered(answer.number)
        self._budget.note_answered(answer.number, answer.total_ns / 1e9)
        if answer.prompt_logprobs:
            self._take_logprobs(chunks, answer.prompt_logprobs, applied)
        take, failures, complete_ids = applied.taken.append, answer.failures, answer.complete_ids
        one_each = zip(answer.token_ids, strict=True)  # tuples of one token
        for request_id, tokens in zip(answer.request_ids, one_each, strict=True):
            request = self._requests.get(request_id)
            if request is None:
                take(())
            elif failures and request_id in failures:
                take(())
                self._fail(request, failures[request_id], applied)
            else:
                is_complete = bool(complete_ids) and request_id in complete_ids
                taken, reason = request.add_tokens(tokens, self._end_tokens, is_complete)
                take(taken)
                request.tenant.serve_output(len(taken))
                if reason is not None:
                    applied.ended[request_id] = reason
                    self._complete(request)
        for chunk in chunks:
            self._confirm(chunk, applied)
        ended = (*applied.ended, *applied.failed, *applied.computed)
        applied.freed.extend(i for i in ended if self.active.find(i) is None)
        for request in self.active.take_left(answer.number):
            self._release(request)
            if request.ended:
                applied.freed.append(request.id)
        return applied

    def _take_logprobs(self, chunks: Iterable[Chunk], prompts: Mapping[int, PromptLogprobs], applied: Applied) -> None:
        for chunk in chunks:
            given, request = prompts.get(chunk.request_id), self._requests.get(chunk.request_id)
            if given is None or request is None or request.prompt_logprobs is None:
                continue
            if given.are_finite:
                request.prompt_logprobs.add(chunk.start, given)
            else:
                self._fail(request, NOT_FINITE, applied)

    def _fail(self, request: Running, reason: str, applied: Applied) -> None:
        """Ends a request that failed alone. What was computed for it may be invalid, so the cache forgets it."""
        applied.failed[request.id] = reason
        self.memory.forget(request)
        self._end(request)

    def _confirm(self, chunk: Chunk, applied: Applied) -> None:
        request = self.active.find(chunk.request_id)
        if request is None:
            return
        request.blame.note_chunk(chunk.end)
        self.memory.confirm(request, chunk.end)
        if chunk.last:
            self.memory.withdraw(request)
        elif request.is_computed_at(chunk.end) and not request.ended:
            applied.computed.append(request.id)
            self._end(request)

    def note_adapter(self, adapter: str) -> None:
        """To be called when an `AdapterStep` has answered: requests of the adapter may join."""
        self.adapters.note_loaded(adapter, self.joining.times.num_forwards)
        self.joining.times.retry_now()

    def refuse_adapter(self, adapter: str) -> list[Running]:
        """Ends and returns the requests of an adapter that the shards cannot load."""
        self.adapters.note_refused(adapter)
        given_up = [request for request in self._requests.values() if request.request.adapter == adapter]
        for request in given_up:
            self._end(request)
        return given_up

    def clear(self) -> ClearStep:
        """The step that drops every row of the shards. To be sent after a step has failed."""
        return ClearStep(self.steps.next_number())

    def put_back(self, unanswered: Iterable[ForwardStep]) -> list[Running]:
        """To be called after a loss, when all rows of the shards are void and no step is in flight. Puts all running
        and leaving requests back into the queue, with their confirmed tokens.

        One of the `unanswered` steps caused the loss, or something outside the shards did. Returns the requests that
        this loss ends (see `blame.py`).
        """
        reached = reaches(unanswered)
        self._num_losses += 1
        aboard = [r for i in reached if (r := self._requests.get(i)) is not None]
        for request in aboard:
            request.blame.meet_loss(reached[request.id], was_alone=len(reached) == 1, newest=self._newest)
        given_up = [request for request in aboard if request.blame.ends_request]
        for request in given_up:
            request.ended = True
            del self._requests[request.id]
        for request in self.active.running.values():
            request.blame.note_replay(self._num_losses, request.is_known_to_shards)
            self.queue.stop(request)
            self._admission.leave(request)
        for request in self.active.clear():
            self._release(request)
        self.steps.void()
        self.adapters.void()
        self._budget.void()
        self._num_joined = 0
        return given_up
