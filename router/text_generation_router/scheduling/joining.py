"""Decides which waiting requests join the running batch, and when.

TGI's rule says when: at once if no request runs. Otherwise when the number of waiting requests reaches
`waiting_served_ratio` times the number of running ones, or after `max_waiting_tokens` decode steps. Requests then join
in the order of the queue, until rows, memory or the step's budget of prompt tokens are used up. No request overtakes a
request that does not fit, except one that waits for its LoRA adapter. A suspect, and a request that a loss has stopped,
do not wait for TGI's rule. There is one exception to the rule and to the order: a request joins at once if another
owner or tenant has too many running requests, and therefore owes a place to this request's owner or tenant.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain

from text_generation_router.scheduling.admission import AdmissionControl, Forecast
from text_generation_router.scheduling.chunks import OwnerParts, guaranteed_share
from text_generation_router.scheduling.costs import ChunkBudget
from text_generation_router.scheduling.join_times import JoinTimes
from text_generation_router.scheduling.lines import WINDOW
from text_generation_router.scheduling.memory.memory import Memory
from text_generation_router.scheduling.queue import Queue
from text_generation_router.scheduling.request import Limits
from text_generation_router.scheduling.running import ActiveRequests, Running
from text_generation_router.scheduling.tenant import Account

# Places in the running batch that owners and tenants with too many running requests owe to others, and the requests
# that give up these places.

# A request is preempted for another tenant only after it has made FEWEST_TOKENS tokens since it joined.
FEWEST_TOKENS = 4
# An account (owner or tenant) crowds the others if more than this fraction of the running requests belongs to it.
CROWD = 0.25


@dataclass(frozen=True, slots=True)
class Claim:
    """A waiting request that is owed a place by another owner, or by another tenant of its own owner."""

    request: Running
    between_owners: bool
    most: int  # largest number of running requests of an account that owes the place

    def account_of(self, running: Running) -> Account:
        """The account that gives up a place if `running` is preempted."""
        return running.tenant.owner if self.between_owners else running.tenant

    @property
    def account(self) -> Account:
        return self.account_of(self.request)

    def crowding(self, victim: Running) -> tuple[int, int]:
        """Sort key: requests of the account with the most running requests are preempted first."""
        return -victim.tenant.owner.num_running if self.between_owners else 0, -victim.tenant.num_running


class OwedPlaces:
    def __init__(
        self, memory: Memory, queue: Queue, admission: AdmissionControl, priority_between_tenants: bool
    ) -> None:
        self._memory = memory
        self._queue = queue
        self._admission = admission
        self._priority_between_tenants = priority_between_tenants
        # The waiting request for which running requests are preempted, and these running requests.
        self._favoured: Running | None = None
        self._victims: list[Running] = []

    def claim(self, running: Mapping[int, Running]) -> Claim | None:
        """The first request that is owed a place, even if the account that owes it has no more than CROWD of the
        running requests.
        """
        most = max((request.tenant.owner.num_running for request in running.values()), default=0)
        request = self._queue.owed(most)
        if request is None:
            return None
        owner = request.tenant.owner
        if owner.is_owed_by(most):
            return Claim(request, True, most)
        mates = (r.tenant.num_running for r in running.values() if r.tenant.owner is owner)
        # 0 by default: requests of the other tenants may all have joined in this step, and are not in `running` yet.
        return Claim(request, False, max(mates, default=0))

    def owed(self, running: Mapping[int, Running]) -> Running | None:
        """The waiting request that is owed a place by an account with more than CROWD of the running requests. None
        while a suspect waits, because the suspect goes first.
        """
        claim = self.claim(running)
        if claim is None or self._queue.has_suspect_next:
            return None
        return claim.request if claim.most > CROWD * len(running) else None

    @property
    def favoured(self) -> Running | None:
        """The waiting request for which others were preempted, if there is one."""
        if self._favoured is not None and (self._favoured.ended or self._favoured.holding is not None):
            self._favoured = None
        return self._favoured

    def note_freed(self) -> bool:
        """Notes that slots were freed. Returns whether all preempted requests have now given up their slots."""
        has_room = bool(self._victims) and all(victim.holding is None for victim in self._victims)
        if has_room:
            self._victims = []
        return has_room

    def open_claim(self, running: Mapping[int, Running]) -> Claim | None:
        """The claim for which running requests may be preempted now. None while requests preempted for the last claim
        still have slots."""
        return self.claim(running) if not self._victims else None

    def choose_victims(
        self, claim: Claim, running: Collection[Running], preempted: Collection[Running]
    ) -> list[Running]:
        """The requests to preempt for a request that is owed a place, besides those that are `preempted` anyway. Owners
        with more than twice as many running requests as the request's owner give up places. If there are none and the
        request's tenant has no running request, tenants of the same owner with several running requests give up places.
        """
        request = claim.request
        payers = [r for r in running if claim.between_owners or r.tenant.owner is request.tenant.owner]
        places = Counter(claim.account_of(r) for r in payers)
        missing = request.num_tokens + int(self._admission.expect(request).mean()) - self._memory.num_available
        by_cost = sorted(payers, key=lambda r: (*claim.crowding(r), self._memory.num_exclusive(r), r.newness))
        victims: list[Running] = []
        for victim in by_cost:
            if victims and missing <= 0:
                break
            payer = claim.account_of(victim)
            may_go = victim not in preempted and self._may_be_sent_away(victim, request)
            if may_go and claim.account.is_owed_by(places[payer]):
                places[payer] -= 1
                missing -= self._memory.num_exclusive(victim)
                victims.append(victim)
        if victims:
            self._favoured, self._victims = request, victims
        return victims

    def _may_be_sent_away(self, victim: Running, request: Running) -> bool:
        """Whether `victim` may be preempted for another tenant's `request`: not before it has made FEWEST_TOKENS tokens
        since it joined, and, where priorities count between tenants, not for a request of worse priority."""
        return (
            (victim.request.priority >= request.request.priority or not self._priority_between_tenants)
            and victim.num_sent - victim.num_sent_at_start >= FEWEST_TOKENS
            and not victim.is_ending
        )


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
        waited = not times.steps_until_wait_is_over or queue.has_exempt_next
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
        num_due = 0  # joined streams that go on with one token: they cost next to nothing, and are not counted
        for request in chain(
            [first] if first is not None else [], self._queue.candidates(skipped, self._memory.cached_length)
        ):
            if request.blame.runs_alone and (joined or prefilling):
                break
            obstacle = self._obstacle(request, running, [*prefilling, *joined], is_owed=request is first)
            if obstacle is None:
                self._start(request)
                joined.append(request)
                num_due += request.is_due
                running[request.id] = request
            else:
                self._note_wait(obstacle, request)
                skipped.add(request.id)
            if (
                obstacle not in (None, "prefix", "adapter")
                # A suspect that waits for its adapter must hold up no request whose adapter is in a slot.
                or (request.blame.runs_alone and obstacle != "adapter")
                or len(joined) + len(skipped) - num_due >= WINDOW
            ):
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
        if not self._queue.admits(request):
            return "adapter"
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
