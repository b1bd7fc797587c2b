"""Decides which waiting requests join the running batch, and when.

TGI's rule says when: at once if no request runs. Otherwise when the number of waiting requests reaches
`waiting_served_ratio` times the number of running ones, or after `max_waiting_tokens` decode steps. Requests then join
in the order of the queue, until rows, memory or the step's budget of prompt tokens are used up. No request overtakes a
request that does not fit. There is one exception to TGI's rule and to the order: a request joins at once if another
owner or tenant has too many running requests, and therefore owes a place to this request's owner or tenant.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from text_generation_router.scheduling.admission import AdmissionControl, Forecast
from text_generation_router.scheduling.chunks import OwnerParts, guaranteed_share
from text_generation_router.scheduling.costs import ChunkBudget
from text_generation_router.scheduling.join_times import JoinTimes
from text_generation_router.scheduling.lines import WINDOW
from text_generation_router.scheduling.memory.memory import Memory
from text_generation_router.scheduling.owed_places import OwedPlaces
from text_generation_router.scheduling.queue import Queue
from text_generation_router.scheduling.request import Limits
from text_generation_router.scheduling.running import ActiveRequests, Running


@dataclass(frozen=True, slots=True)
class Joins:
    """The requests that join the running batch, or leave it, before the next step."""

    joined: tuple[Running, ...] = ()  # out of the queue, with memory for their histories
    preempted: tuple[Running, ...] = ()  # running requests that give up their places
    reason: str | None = None  # why requests joined a running batch, in TGI's words


NO_JOINS = Joins()


class Joining:
    def __init__(
        self, limits: Limits, memory: Memory, queue: Queue, admission: AdmissionControl, budget: ChunkBudget
    ) -> None:
        self.times = JoinTimes(limits.policy.max_waiting_tokens)
        self.places = OwedPlaces(memory, queue, admission, limits.policy.priority_between_tenants)
        self.parts = OwnerParts(limits.max_batch_prefill_tokens)
        self._limits = limits
        self._memory = memory
        self._queue = queue
        self._admission = admission
        self._budget = budget
        self._forecast = Forecast(admission, memory)

    def note_freed(self, slots: int) -> None:
        """Notes that `slots` token slots were just freed: a refused request may be tried again."""
        self.times.note_freed(slots)
        if self.places.note_freed():
            self.times.retry_now()

    def are_enough(self, num_running: int) -> bool:
        """Whether enough requests wait to interrupt `num_running` running ones."""
        return len(self._queue) >= int(num_running * self._limits.policy.waiting_served_ratio)

    def choose(self, active: ActiveRequests) -> Joins:
        self._memory.begin_step()
        queue, times, running = self._queue, self.times, active.running
        if not len(queue):
            return NO_JOINS
        num_served = sum(not request.paused for request in running.values())
        if num_served and times.steps_until_retry:
            return NO_JOINS
        # A suspect, retried alone after failed steps, is exempt from TGI's joining rule.
        waited = not times.steps_until_wait_is_over or queue.has_suspect_next
        owed = self.places.owed(running)
        if num_served and owed is None and not waited and not self.are_enough(num_served):
            self._note_wait("rule")
            return NO_JOINS
        joined = self._take(active, owed)
        preempted: list[Running] = []
        if times.steps_until_retry or active.num_running >= self._limits.max_running:
            preempted = self._make_room(running)
        if any(request is not owed for request in joined):
            # If only the request that is owed a place joined, the others keep their waiting time.
            times.restart_wait()
        # TGI counts the reason for joining only if other requests were running.
        reason = ("wait_exceeded" if waited else "backpressure") if num_served else None
        return Joins(tuple(joined), tuple(preempted), reason)

    def _take(self, active: ActiveRequests, owed: Running | None) -> list[Running]:
        """Starts and returns as many requests as fit."""
        joined: list[Running] = []
        if active.suspect is not None:
            return joined
        if active.num_running >= self._limits.max_running:
            self._note_wait("rows")
            return joined
        running = dict(active.running)
        prefilling = [request for request in running.values() if request.prefilled < request.prefill_to]
        first = self.places.favoured or owed
        skipped: set[int] = set()
        for request in chain(
            [first] if first is not None else [], self._queue.candidates(skipped, self._memory.cached_length)
        ):
            if request.blame.runs_alone and (joined or prefilling):
                break
            obstacle = self._obstacle(request, running, [*prefilling, *joined], is_owed=request is first)
            if obstacle is None:
                self._start(request)
                joined.append(request)
                running[request.id] = request
            else:
                self._note_wait(obstacle, request)
                skipped.add(request.id)
            if obstacle not in (None, "prefix") or request.blame.runs_alone or len(joined) + len(skipped) >= WINDOW:
                break
        return joined

    def _obstacle(
        self, request: Running, running: Mapping[int, Running], prefilling: list[Running], is_owed: bool
    ) -> str | None:
        """Why the request cannot start now. None: it can, and it now holds its cached prefix. A request that `is_owed`
        a place does not wait for the prompts of others."""
        memory, most = self._memory, self.parts.most(self.times.num_forwards)
        if len(running) >= self._limits.max_running:
            return "rows"
        if memory.should_wait(request):
            return "prefix"
        if not is_owed and self._exceeds_budget(request, prefilling, most):
            return "budget"
        memory.hold(request)
        request.start()
        # A forecast that uses the lengths of recent answers may err. The other one must hold whatever steps cost.
        budget = self._budget.newest if self._admission.uses_history else self._budget.at_least
        if self._forecast.admits(request, running.values(), prefilling, self.times.num_forwards, min(most, budget)):
            return None
        if memory.num_held == memory.num_exclusive(request):
            return None  # only this request holds slots: validation rejects requests that do not fit alone
        memory.let_go(request)
        self.times.pause(self._forecast.missing)
        return "memory"

    def _exceeds_budget(self, request: Running, prefilling: list[Running], most: int) -> bool:
        """Whether the prompts that are being computed leave too little of a step for this one: of the budget, or of the
        `most` tokens that its owner may have."""
        budget, owner = self._limits.max_batch_prefill_tokens, request.tenant.owner
        share = guaranteed_share(request.num_tokens - self._memory.cached_length_now(request), budget)
        promised = [(guaranteed_share(r.num_uncomputed, budget), r.tenant.owner is owner) for r in prefilling]
        of_owner = sum(tokens for tokens, is_own in promised if is_own)
        return share + sum(tokens for tokens, _ in promised) > budget or (of_owner > 0 and share + of_owner > most)

    def _start(self, request: Running) -> None:
        self.parts.note_joined(request.tenant.owner, self.times.num_forwards)
        self._queue.join(request, request.num_uncomputed)
        self._memory.start(request)
        request.begin(self._admission.expect(request))
        self._admission.join(request)

    def _make_room(self, running: Mapping[int, Running]) -> list[Running]:
        """The running requests to preempt. These are requests that give up places which they owe and, if a waiting
        request could go on, paused requests, because their clients do not read anyway.
        """
        preempted = [request for request in running.values() if request.paused] if self._queue.has_candidates else []
        claim = self.places.open_claim(running)
        if claim is None:
            return preempted
        victims = self.places.choose_victims(claim, running.values(), preempted)
        if not victims:
            self.times.retry_next_step()  # the running request that has to leave may have made enough tokens by then
        return preempted + victims

    def _note_wait(self, reason: str, request: Running | None = None) -> None:
        """Notes why `request`, or by default the first waiting request, stays in the queue."""
        request = request or next(self._queue.waiting(), None)
        if request is not None:
            request.waited_for = reason
