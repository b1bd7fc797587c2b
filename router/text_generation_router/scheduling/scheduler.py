"""Decides each step: who joins, who goes on, who leaves, and which slots the new tokens get.

The rules of design section 5a: a step is decided without knowing the tokens of the one before it; slots return when
the last step that contains their request has answered; a failed step sends everybody through a fresh start.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from text_generation_router.scheduling.admission import Reservation
from text_generation_router.scheduling.queue import Queue
from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.slots import TokenSlots
from text_generation_router.scheduling.step import Chunk, ClearStep, FilterStep, FirstChunk, ForwardStep, Step

# A request is given up when this many steps in a row failed with it aboard.
MAX_FAILURES = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """TGI's knobs. `waiting_served_ratio`: that many waiting per running request may interrupt; after
    `max_waiting_tokens` decode steps any may."""

    capacity: int  # token slots
    max_rows: int  # requests that may hold a row in the shards
    max_batch_prefill_tokens: int
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    max_batch_size: int | None = None

    @property
    def max_running(self) -> int:
        return min(self.max_rows, self.max_batch_size or self.max_rows)


class Scheduler:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.slots = TokenSlots(limits.capacity)
        self._reservation = Reservation(limits.capacity)
        self._queue = Queue()
        self._running: dict[int, Running] = {}  # hold a row and slots, in order of joining
        self._leaving: list[Running] = []  # ended; their last step has not answered
        self._departed: set[int] = set()  # ended; their rows are still in the shards
        self._next_id = 1
        self._next_number = 1
        self._waiting_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_reserved(self) -> int:
        return self._reservation.reserved

    def can_hold(self, request: Running) -> bool:
        """Whether it fits when it is alone."""
        return request.reservation <= self.limits.capacity

    @property
    def is_idle(self) -> bool:
        return not (self._queue or self._running or self._leaving)

    def add(self, request: GenerationRequest) -> Running:
        """Queues a request that fits the limits."""
        running = Running(self._next_id, request)
        assert self.can_hold(running), "validation lets through what can never fit"
        self._next_id += 1
        self._queue.append(running)
        return running

    def end(self, request: Running, answered: int) -> None:
        """It is over: finished or cancelled, running or waiting. `answered` is the newest step that has answered."""
        if request.ended:
            return
        request.ended = True
        if request.id not in self._running:
            self._queue.remove(request)
            return
        del self._running[request.id]
        self._departed.add(request.id)
        if request.last_step > answered:
            self._leaving.append(request)
        else:
            self._release(request)

    def next_step(self) -> Step | None:
        """The next call to the shards; None when there is nothing to do until something answers or arrives."""
        joining, reason = self._choose_joining()
        chunked = [r for r in self._running.values() if r.is_prefilling]
        # A request that was aboard a failed step starts alone, so that a second failure names the culprit.
        decoding = [] if any(r.failures for r in chunked + joining) else self._decoding()
        if not (joining or chunked or decoding):
            return self._drop_rows() if not self._running else None
        if self._departed:
            return self._drop_rows()
        for request in joining:
            self._join(request)
        return self._forward(decoding, chunked + joining, len(joining), reason)

    def _choose_joining(self) -> tuple[list[Running], str | None]:
        """TGI's rule. Decides without changing anything; `_join` carries it out."""
        running = sum(not (r.ended or r.paused) for r in self._running.values())
        waited = self._waiting_tokens >= self.limits.max_waiting_tokens
        picked = self._fitting()
        # Who begins again alone (see `next_step`) has waited enough.
        alone = bool(picked and picked[0].failures)
        minimum = 0 if waited or alone or not running else int(running * self.limits.waiting_served_ratio)
        if not picked or len(picked) < minimum:
            return [], None
        return picked, ("wait_exceeded" if waited else "backpressure") if running else None

    def _fitting(self) -> list[Running]:
        """From the head of the queue, as long as budget, rows and slots last. Who was aboard a failed step shares its
        prefill with nobody."""
        picked: list[Running] = []
        prefilling = [r for r in self._running.values() if r.is_prefilling]
        if any(r.failures for r in prefilling):
            return picked
        budget = self.limits.max_batch_prefill_tokens - sum(r.prefill_to - r.prefilled for r in prefilling)
        rows = self.limits.max_running - len(self._running) - len(self._leaving)
        needed = 0
        for request in self._queue.waiting():
            needed += request.reservation
            must_be_alone = request.failures if picked or prefilling else 0
            if budget <= 0 or rows <= len(picked) or not self._reservation.fits(needed) or must_be_alone:
                break
            picked.append(request)
            if request.failures:
                break
            budget -= len(request.request.input_ids) + len(request.output_ids)
        return picked

    def _decoding(self) -> list[Running]:
        return [r for r in self._running.values() if r.wants_token]

    def _join(self, request: Running) -> None:
        self._queue.remove(request)
        self._reservation.admit(request.reservation)
        request.start()
        request.add_slots(self.slots.allocate(request.prefill_to))
        self._running[request.id] = request
        self._waiting_tokens = 0

    def _forward(
        self, decoding: list[Running], prefilling: list[Running], joined: int, reason: str | None
    ) -> ForwardStep:
        number = self._take_number()
        chunks = tuple(self._chunks(prefilling, number))
        slots = self.slots.allocate(len(decoding))
        for i, request in enumerate(decoding):
            request.add_slots(slots[i : i + 1])
            request.num_sent += 1
            request.last_step = number
        if not chunks:
            self._waiting_tokens += 1
        return ForwardStep(number, tuple(r.id for r in decoding), slots, chunks, joined, reason)

    def _chunks(self, prefilling: list[Running], number: int) -> Iterable[Chunk]:
        budget = self.limits.max_batch_prefill_tokens
        for request in prefilling:
            start = request.prefilled
            end = min(request.prefill_to, start + budget)
            if end == start:
                return
            budget -= end - start
            request.prefilled, request.last_step = end, number
            last = end == request.prefill_to
            request.num_sent += last
            yield Chunk(request.id, start, end, last, None if start else _first_chunk(request))

    def _drop_rows(self) -> Step | None:
        if not self._departed:
            return None
        self._departed.clear()
        return FilterStep(self._take_number(), tuple(self._running))

    def _take_number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def answered(self, number: int) -> None:
        """Step `number`, and with it every earlier one, has answered: slots of those who left with it are free."""
        for request in [r for r in self._leaving if r.last_step <= number]:
            self._leaving.remove(request)
            self._release(request)

    def confirm(self, request_id: int, token_id: int) -> Running | None:
        """A token of a step that answered. None if its request is over: the token is dropped."""
        request = self._running.get(request_id)
        if request is not None:
            request.output_ids.append(token_id)
            request.failures = 0
        return request

    def clear(self) -> ClearStep:
        """The step that empties the shards, after a failed one."""
        return ClearStep(self._take_number())

    def put_back(self, blamed: Iterable[int]) -> list[Running]:
        """When no step is in flight and the shards' rows are void: everybody starts again from what is confirmed.

        `blamed` were aboard the step in which it happened; those for whom it is the second time in a row are given up,
        and returned.
        """
        given_up = []
        for request_id in blamed:
            if request := self._running.get(request_id):
                request.failures += 1
                if request.failures >= MAX_FAILURES:
                    given_up.append(request)
        for request in [*self._running.values(), *self._leaving]:
            self._release(request)
            if not request.ended and request not in given_up:
                self._queue.put_back(request)
        for request in given_up:
            request.ended = True
        self._running.clear()
        self._leaving.clear()
        self._departed.clear()
        return given_up

    def begin_generation(self, capacity: int) -> list[Running]:
        """New shards, with room for `capacity` tokens and nothing in it. Everybody waits (see `put_back`).

        Those that do not fit any more are given up, and returned.
        """
        assert not (self._running or self._leaving), "rows of the last generation"
        self.limits = replace(self.limits, capacity=capacity)
        self.slots = TokenSlots(capacity)
        self._reservation = Reservation(capacity)
        self._next_number = 1
        given_up = [request for request in self._queue.waiting() if not self.can_hold(request)]
        for request in given_up:
            self._queue.remove(request)
            request.ended = True
        return given_up

    def _release(self, request: Running) -> None:
        self._reservation.give_back(request.reservation)
        self.slots.release(request.take_slots())


def _first_chunk(request: Running) -> FirstChunk:
    asked = request.request
    ids = (*asked.input_ids, *request.output_ids)
    slots = request.slots[: request.num_slots].copy()
    return FirstChunk(ids, slots, len(asked.input_ids), asked.sampling, asked.sampling.is_greedy)
