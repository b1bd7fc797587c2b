"""Decides each step: which requests join, go on and leave, and which token slots the new tokens get.

The rules are in ARCHITECTURE.md, section 5: a step is decided without knowing the tokens of the step before it; slots
return when the last step that contains their request has answered; after a failed step all requests start again.

A request is in one of four states: *waiting* in the queue, without a row or slots; *running*, with a row in the shards
and token slots; *leaving*, ended or preempted but still with slots, because an unanswered step carries it; *gone*. The
row of a request that left is *departed* until a filter step removes it from the shards.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from text_generation_router.scheduling.admission import AdmissionControl
from text_generation_router.scheduling.blame import reaches
from text_generation_router.scheduling.chunks import shares
from text_generation_router.scheduling.joining import Joining
from text_generation_router.scheduling.limits import Limits
from text_generation_router.scheduling.look_ahead import steps_until_start
from text_generation_router.scheduling.memory.memory import Memory
from text_generation_router.scheduling.memory.prefix_cache import PrefixCache
from text_generation_router.scheduling.memory.slots import TokenSlots
from text_generation_router.scheduling.queue import Queue
from text_generation_router.scheduling.request import FinishReason, GenerationRequest
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.step import (
    Applied,
    Chunk,
    ClearStep,
    FilterStep,
    FirstChunk,
    ForwardStep,
    Step,
    StepTokens,
)


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the router started: all in tokens, except `preemptions`."""

    preemptions: int = 0
    recomputed_tokens: int = 0  # tokens prefilled again after a preemption or a loss of the shards
    prefix_hit_tokens: int = 0  # prompt tokens found in the prefix cache
    prefilled_tokens: int = 0  # tokens in the chunks that were sent


class Scheduler:
    def __init__(self, limits: Limits, seed: int = 0, end_tokens: frozenset[int] = frozenset()) -> None:
        """`seed` seeds the random output lengths that admission draws. `end_tokens`: a request ends with any of these
        token ids, unless it ignores them."""
        self.limits = limits
        self.counters = SchedulerCounters()
        self._admission = AdmissionControl(limits.policy.admission, seed)
        self._queue = Queue(lambda request: self._memory.cached_length(request), limits.policy.priority_between_tenants)
        self._end_tokens = end_tokens
        self._requests: dict[int, Running] = {}  # id → request that has not ended
        self._running: dict[int, Running] = {}  # id → running request, in order of joining
        self._leaving: list[Running] = []  # ended or preempted requests whose last step has not answered
        self._departed: set[int] = set()  # ids of requests that left, with a row still in the shards
        self._sent: deque[ForwardStep] = deque()  # steps that have not answered yet
        self._num_joined = 0  # requests that joined since the last forward step
        self._next_id = 1
        self._begin(limits.capacity)

    def _begin(self, capacity: int) -> None:
        self.limits = replace(self.limits, capacity=capacity)
        self._memory = Memory(capacity, self.limits.policy.prefix_caching)
        self._joining = Joining(self.limits, self._memory, self._queue, self._admission)
        self._next_number = 1
        self._answered = 0

    @property
    def slots(self) -> TokenSlots:
        return self._memory.slots

    @property
    def cache(self) -> PrefixCache:
        return self._memory.cache

    @property
    def num_held(self) -> int:
        """Slots in use by requests: private slots, and slots of the prefix cache that a request holds."""
        return self._memory.num_held

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        return self._queue.num_tokens

    def may_wait(self, request: GenerationRequest, most: int) -> bool:
        """Whether the queue, in which `most` prompt tokens may wait, has room for it."""
        return self._queue.has_room(request.share, len(request.input_ids), most)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_reserved(self) -> int:
        """Slots that the running requests would hold at their greatest lengths."""
        return sum(request.most_slots for request in self._running.values())

    @property
    def num_steps(self) -> int:
        """Steps decided since the shards were last (re)started."""
        return self._next_number - 1

    def can_hold(self, request: Running) -> bool:
        """Whether the request fits into the memory when no other request runs."""
        return request.most_slots <= self.limits.capacity

    def steps_until_start(self) -> float:
        """Forecast: after how many steps a request that arrives now starts, if it waits behind all others."""
        running = self._admission.stays(list(self._running.values()))
        waiting = self._admission.stays(list(self._queue.waiting()))
        limits = self.limits
        return steps_until_start(running, waiting, limits.capacity, limits.max_running, limits.max_batch_prefill_tokens)

    @property
    def is_idle(self) -> bool:
        return not (self._queue or self._running or self._leaving)

    def add(self, request: GenerationRequest) -> Running:
        """Queues a request that validation found to fit the limits."""
        running = Running(self._next_id, request)
        assert self.can_hold(running), "validation lets through what can never fit"
        self._next_id += 1
        self._requests[running.id] = running
        self._queue.append(running)
        if not running.tenant.num_running:
            self._joining.retry_now()
        return running

    def end(self, request_id: int) -> None:
        """Ends a request that is complete, because its text has reached a stop string. No effect if it has ended."""
        if (request := self._requests.get(request_id)) is not None:
            self._complete(request)

    def cancel(self, request_id: int) -> None:
        """Ends a request that is not complete: its client left, or its time ran out. No effect if it has ended."""
        if (request := self._requests.get(request_id)) is not None:
            self._end(request)

    def _complete(self, request: Running) -> None:
        self._admission.learn(len(request.output_ids))
        self._end(request)

    def _end(self, request: Running) -> None:
        request.ended = True
        del self._requests[request.id]
        if request.id in self._running:
            self._leave(request)
        elif request.holding is None:
            self._queue.remove(request)
            self._memory.forget_match(request)

    def next_step(self) -> Step | None:
        """The next call to the shards. None: nothing to send before a step answers or a request arrives."""
        if not self._departed:
            self._join()
        return self._drop_rows() if self._departed else self._forward()

    def _join(self) -> None:
        for request in self._joining.choose(self._running):
            self._count_start(request)
            self._running[request.id] = request
            self._num_joined += 1
        for request in self._joining.take_preempted():
            self._preempt(request)

    def _forward(self) -> ForwardStep | None:
        suspect = self._joining.suspect(self._running)
        if suspect is not None and self._is_anybody_else_aboard(suspect):
            return None
        running = self._running.values() if suspect is None else [suspect]
        prefilling = [r for r in running if r.prefilled < r.prefill_to]
        # A suspect makes one token alone. Its second token is not sent before the first is confirmed, because the other
        # requests may go on from then.
        decoding = self._with_room([r for r in running if r.wants_token]) if suspect is None else []
        prefilling = [r for r in prefilling if r.id in self._running]  # `_with_room` may have preempted some
        if not (prefilling or decoding):
            return None
        number = self._take_number()
        chunks = tuple(self._chunks(prefilling, number))
        slots = self._memory.allocate(len(decoding))
        for request, slot in zip(decoding, slots.tolist(), strict=True):
            holding = request.holding
            assert holding is not None
            holding.slots[holding.count] = slot
            holding.count += 1
            request.num_sent += 1
            request.last_step = number
        self._joining.note_forward(1, decodes=bool(decoding))
        joined, self._num_joined = self._num_joined, 0
        reason = self._joining.reason if joined else None
        step = ForwardStep(number, tuple(r.id for r in decoding), slots, chunks, joined, reason)
        self._sent.append(step)
        return step

    def _is_anybody_else_aboard(self, suspect: Running) -> bool:
        """Whether an unanswered step carries another request: that request could be the cause of a loss too."""
        return any(request_id != suspect.id for step in self._sent for request_id in step.request_ids)

    def _count_start(self, request: Running) -> None:
        if request.most_computed:
            again = min(request.most_computed, request.prefill_to) - request.prefilled
            self.counters.recomputed_tokens += max(0, again)
        else:
            self.counters.prefix_hit_tokens += request.prefilled

    def _with_room(self, decoding: list[Running]) -> list[Running]:
        """The requests of `decoding` that get a slot for their next token. If the slots of leaving and ending requests
        will not be enough for the rest, running requests are preempted until the others fit (see `_victim`)."""
        memory = self._memory
        while (missing := len(decoding) - memory.num_available) > 0:
            ending = [request for request in self._running.values() if request.is_ending]
            soon = sum(memory.num_exclusive(request) for request in [*self._leaving, *ending])
            victim = self._victim()
            if soon >= missing or victim is None:
                return decoding[:-missing]
            self._preempt(victim)
            decoding = [request for request in decoding if request is not victim]
        return decoding

    def _victim(self) -> Running | None:
        """The running request to preempt: a paused one first, then the one with the fewest slots of its own, then the
        newest. None if fewer than two requests run, or all are about to end."""
        if len(self._running) < 2:
            return None
        able = (request for request in self._running.values() if not request.is_ending)
        return min(able, key=lambda r: (not r.paused, self._memory.num_exclusive(r), -r.id), default=None)

    def _preempt(self, request: Running) -> None:
        """Takes the request's row and slots away. The request joins again, with all its tokens, when there is room."""
        self.counters.preemptions += 1
        self._leave(request)

    def _leave(self, request: Running) -> None:
        del self._running[request.id]
        if request.is_known_to_shards:
            self._departed.add(request.id)
        self._queue.left(request)
        self._admission.leave(request)
        if request.last_step > self._answered:
            self._leaving.append(request)
        else:
            self._release(request)

    def _chunks(self, prefilling: list[Running], number: int) -> Iterable[Chunk]:
        prefilling = sorted(prefilling, key=lambda r: r.id if r.blame.is_replayed else self._next_id)
        num_replayed = sum(r.blame.is_replayed for r in prefilling)
        of_each = shares([r.num_uncomputed for r in prefilling], self.limits.max_batch_prefill_tokens, num_replayed)
        for request, share in zip(prefilling, of_each, strict=True):
            if not share:
                continue
            start, end = request.prefilled, request.prefilled + share
            last = end == request.prefill_to
            first = None if request.is_known_to_shards else _first_chunk(request)
            request.prefilled, request.last_step, request.is_known_to_shards = end, number, True
            request.num_sent += last
            self.counters.prefilled_tokens += share
            yield Chunk(request.id, start, end, last, first)

    def _drop_rows(self) -> FilterStep:
        self._departed.clear()
        keep = tuple(request.id for request in self._running.values() if request.is_known_to_shards)
        return FilterStep(self._take_number(), keep)

    def _take_number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def apply(self, answer: StepTokens) -> Applied:
        """Takes the answer to the oldest step in flight: confirms its tokens and chunks, ends requests by length, by
        end token or for logits that are not finite, and frees the slots that no later step reads."""
        applied = Applied()
        self._answered = answer.number
        for request_id, tokens in zip(answer.request_ids, answer.tokens, strict=True):
            request = self._requests.get(request_id)
            if request is None:
                applied.taken.append(())
            elif request_id in answer.not_finite_ids:
                applied.taken.append(())
                applied.not_finite.append(request_id)
                self._end_not_finite(request)
            else:
                applied.taken.append(self._take(request, tokens, applied.ended))
            if request is not None and request.ended and request.holding is None:
                applied.freed.append(request_id)
        self._note_answered(answer.number, applied.freed)
        return applied

    def _take(self, request: Running, tokens: tuple[int, ...], ended: dict[int, FinishReason]) -> tuple[int, ...]:
        """Confirms `tokens` up to the token that ends the request. Returns the confirmed tokens."""
        for count, token_id in enumerate(tokens, 1):
            request.add_token(token_id)
            self._queue.served(request)
            if len(request.output_ids) >= request.request.max_new_tokens:
                ended[request.id] = FinishReason.LENGTH
            elif token_id in self._end_tokens and not request.request.ignore_eos:
                ended[request.id] = FinishReason.EOS_TOKEN
            else:
                continue
            self._complete(request)
            return tokens[:count]
        return tokens

    def _end_not_finite(self, request: Running) -> None:
        """Ends a request whose keys and values must not be found in the prefix cache."""
        request.is_good = False
        self._memory.forget(request)
        self._end(request)

    def _note_answered(self, number: int, freed: list[int]) -> None:
        """Step `number` and every earlier step have answered: their chunks are computed, and requests that left during
        these steps release their slots."""
        while self._sent and self._sent[0].number <= number:
            for chunk in self._sent.popleft().chunks:
                self._confirm_chunk(chunk)
        for request in [r for r in self._leaving if r.last_step <= number]:
            self._leaving.remove(request)
            self._release(request)
            if request.ended:
                freed.append(request.id)

    def _confirm_chunk(self, chunk: Chunk) -> None:
        request = self._aboard(chunk.request_id)
        if request is None:
            return
        request.num_computed = max(request.num_computed, chunk.end)
        request.blame.note_chunk(chunk.end)
        self._memory.keep(request)
        if chunk.last:
            self._memory.prefill_done(request)

    def _aboard(self, request_id: int) -> Running | None:
        """The running or leaving request with this id, if there is one."""
        running = self._running.get(request_id)
        return running if running is not None else next((r for r in self._leaving if r.id == request_id), None)

    def clear(self) -> ClearStep:
        """The step that drops every row of the shards, after a step has failed."""
        return ClearStep(self._take_number())

    def put_back(self, unanswered: Iterable[ForwardStep]) -> list[Running]:
        """After a loss, with all rows of the shards void and no step in flight: puts all running and leaving requests
        back into the queue, with their confirmed tokens.

        One of the `unanswered` steps caused the loss, or something outside. Returns the requests that this loss ends
        (see `blame.py`).
        """
        given_up = self._blame(reaches(unanswered))
        for request in given_up:
            request.ended = True
            del self._requests[request.id]
        for request in self._running.values():
            request.blame.is_replayed = True
            self._queue.left(request)
            self._admission.leave(request)
        for request in [*self._running.values(), *self._leaving]:
            self._release(request)
        self._running.clear()
        self._leaving.clear()
        self._departed.clear()
        self._sent.clear()
        self._num_joined = 0
        return given_up

    def _blame(self, reached: dict[int, int]) -> list[Running]:
        aboard = {i: r for i in reached if (r := self._aboard(i)) is not None and not r.ended}
        for i, request in aboard.items():
            request.blame.meet_loss(reached[i], was_alone=len(reached) == 1, newest=self._next_id - 1)
        return [request for request in aboard.values() if request.blame.ends_request]

    def begin_epoch(self, capacity: int, end_tokens: frozenset[int] = frozenset()) -> list[Running]:
        """Starts with new, empty shards of `capacity` token slots, whose model ends texts with `end_tokens`. All
        requests must be waiting (see `put_back`).

        Ends and returns the waiting requests that do not fit into the new capacity.
        """
        assert not (self._running or self._leaving), "rows of the last epoch"
        self._begin(capacity)
        self._end_tokens = end_tokens
        given_up = [request for request in self._queue.waiting() if not self.can_hold(request)]
        for request in given_up:
            self._queue.remove(request)
            request.ended = True
            del self._requests[request.id]
        return given_up

    def _release(self, request: Running) -> None:
        """Gives the slots of a request back. No unanswered step may carry the request."""
        before = self._memory.num_available
        self._memory.release(request)
        self._joining.retry(self._memory.num_available - before)
        if not request.ended:
            self._queue.put_back(request)

    def books(self) -> str | None:
        """Checks the accounts of the token slots: what is wrong, or None. Each slot is free, or cached, or owned by one
        request, and while no request runs or leaves, no cached slot is held."""
        slots, cache = self.slots, self.cache
        aboard = [*self._running.values(), *self._leaving]
        private = sum(request.holding.num_private for request in aboard if request.holding)
        if slots.num_free + cache.num_tokens + private != slots.capacity:
            return f"{slots.num_free} free + {cache.num_tokens} cached + {private} held != {slots.capacity} slots"
        if not aboard and cache.num_evictable != cache.num_tokens:
            return f"{cache.num_tokens - cache.num_evictable} cached slots are held by nobody"
        return None

    def quiet_steps(self) -> int:
        """Number of coming decode steps that carry exactly the rows of the steps in flight and end no request, provided
        that no request arrives, ends early or is cancelled meanwhile. 0: the next step is different."""
        rows, sent = len(self._running), self._sent
        if not rows or self._departed or self._leaving or not all(r.wants_token for r in self._running.values()):
            return 0
        if any(step.chunks or len(step.decode_ids) != rows for step in sent):
            return 0
        if self._next_number - 1 - self._answered != len(sent):
            return 0  # a step without tokens is in flight, so fewer tokens come than steps answer
        left = min(r.request.max_new_tokens - r.num_sent for r in self._running.values()) - (not sent)
        return max(0, min(left, self._memory.num_available // rows, self._joining.quiet_steps(self._running)))

    def jump(self, steps: int, token_of: Callable[[Running], int]) -> None:
        """Advances the state by `steps` decode steps, at most `quiet_steps()`, as if they had been decided and
        answered: each running request gets the token `token_of(request)` `steps` times. Steps in flight stay in
        flight, and their numbers grow by `steps`."""
        self._sent = deque(replace(step, number=step.number + steps) for step in self._sent)
        self._next_number += steps
        self._answered += steps
        slots = self._memory.allocate(steps * len(self._running))
        for i, request in enumerate(self._running.values()):
            assert request.holding is not None
            request.holding.add(slots[i * steps : (i + 1) * steps])
            request.num_sent += steps
            request.last_step += steps
            request.add_tokens(token_of(request), steps)
            self._queue.served(request, steps)
        self._joining.note_forward(steps, decodes=True)


def _first_chunk(request: Running) -> FirstChunk:
    asked = request.request
    ids = (*asked.input_ids, *request.output_ids)
    return FirstChunk(ids, request.slots.copy(), len(asked.input_ids), asked.sampling)
