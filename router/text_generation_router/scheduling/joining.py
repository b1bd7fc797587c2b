"""Decides which waiting requests join the running batch, and when.

TGI's rule says when: at once if no request runs; else when the number of waiting requests reaches
`waiting_served_ratio` times the number of running ones, or after `max_waiting_tokens` decode steps. Requests then join
in the order of the queue, as long as rows, memory and the step's budget of prompt tokens last. A request for which they
do not last is not overtaken. Exempt from rule and turn is a request whose owner or tenant is owed a place by another
owner or tenant with too many running requests.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from text_generation_router.scheduling.admission import AdmissionControl, Forecast
from text_generation_router.scheduling.chunks import guaranteed_share
from text_generation_router.scheduling.limits import Limits
from text_generation_router.scheduling.lines import WINDOW
from text_generation_router.scheduling.memory.memory import Memory
from text_generation_router.scheduling.queue import Queue
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.tenant import Account

# A request refused for lack of memory is tried again after RETRY_STEPS forward steps, or once enough slots are free.
RETRY_STEPS = 8
# A request is preempted for another tenant only after it has made FEWEST_TOKENS tokens since it joined.
FEWEST_TOKENS = 4
# An account (owner or tenant) crowds the others if more than this fraction of the running requests belongs to it.
CROWD = 0.25


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that is owed a place by another owner, or by another tenant of its own owner."""

    request: Running
    between_owners: bool
    most: int  # running requests of the account that owes the place and has the most

    def account_of(self, running: Running) -> Account:
        """The account that gives up a place if `running` is preempted."""
        return running.tenant.owner if self.between_owners else running.tenant

    @property
    def account(self) -> Account:
        return self.account_of(self.request)

    def crowding(self, victim: Running) -> tuple[int, int]:
        """Sort key: requests of the account with the most running requests are preempted first."""
        return -victim.tenant.owner.num_running if self.between_owners else 0, -victim.tenant.num_running


class Joining:
    def __init__(self, limits: Limits, memory: Memory, queue: Queue, admission: AdmissionControl) -> None:
        self.reason: str | None = None  # why the newest requests joined a running batch, in TGI's words
        self._limits = limits
        self._policy = limits.policy
        self._memory = memory
        self._queue = queue
        self._admission = admission
        self._forecast = Forecast(admission, memory, limits.max_batch_prefill_tokens)
        self._preempted: list[Running] = []
        self._waiting_tokens = 0  # decode steps since a request last joined
        self._forwards = 0  # forward steps so far
        # After a refusal for lack of memory: the forward step of the next try, and the slots that were missing.
        self._retry_at = 0
        self._missing = 0
        # The request that running ones are preempted for, and those running ones.
        self._favoured: Running | None = None
        self._victims: list[Running] = []
        self._suspect: Running | None = None  # the last request that started to run alone

    def note_forward(self, steps: int, decodes: bool) -> None:
        """Counts `steps` forward steps. `decodes`: each makes tokens for running requests, with or without chunks."""
        self._forwards += steps
        if decodes:
            self._waiting_tokens += steps

    def retry(self, slots: int) -> None:
        """`slots` token slots were just freed. Once enough are free, a refused request is tried again."""
        self._missing -= slots
        made_room = bool(self._victims) and all(victim.holding is None for victim in self._victims)
        if made_room:
            self._victims = []
        if self._missing <= 0 or made_room:
            self._retry_at = 0

    def retry_now(self) -> None:
        """A request of a tenant with nothing running arrived: refused requests are tried again at the next step."""
        self._retry_at = 0

    def take_preempted(self) -> list[Running]:
        """The running requests to preempt now. Clears the list."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def quiet_steps(self, running: Mapping[int, Running]) -> int:
        """Number of coming decode steps in which no request joins, whatever tokens they make. No request of `running`
        may be paused or prefilling."""
        if not len(self._queue):
            return self._limits.capacity
        if len(running) >= self._limits.max_running and self._claim(running) is None:
            return self._limits.capacity
        if (again := self._queue.again()) is not None and again.blame.runs_alone:
            return 0
        if not self._are_enough(len(running)) and self._owed(running) is None:
            return max(0, self._policy.max_waiting_tokens - self._waiting_tokens)
        return max(0, self._retry_at - self._forwards)

    def choose(self, running: Mapping[int, Running]) -> list[Running]:
        """The requests that join now: out of the queue, with memory for their histories."""
        self._memory.begin_step()
        if not len(self._queue):
            return []
        num_active = sum(not request.paused for request in running.values())
        if num_active and self._forwards < self._retry_at:
            return []
        again = self._queue.again()
        # A suspect, retried alone after failed steps, is exempt from TGI's joining rule.
        waited = self._waiting_tokens >= self._policy.max_waiting_tokens or bool(again and again.blame.runs_alone)
        owed = self._owed(running)
        if num_active and owed is None and not waited and not self._are_enough(num_active):
            self._blame("rule")
            return []
        joined = self._take(dict(running), owed)
        if self._forwards < self._retry_at or len(running) >= self._limits.max_running:
            # If a waiting request could go on, paused ones are preempted: their clients do not read anyway.
            if self._queue.somebody_may_go_on:
                self._preempted = [request for request in running.values() if request.paused]
            self._make_room(running)
        if joined:
            # TGI counts the reason for joining only where other requests were running.
            self.reason = ("wait_exceeded" if waited else "backpressure") if num_active else None
        if any(request is not owed for request in joined):
            self._waiting_tokens = 0  # a request that is owed a place does not restart the others' wait
        return joined

    def suspect(self, running: Mapping[int, Running]) -> Running | None:
        """The running request that has to run alone, if there is one. Meanwhile no step carries the other rows."""
        request = self._suspect
        if request is not None and not (request.blame.runs_alone and request.id in running):
            request = self._suspect = None
        return request

    def _are_enough(self, num_running: int) -> bool:
        return len(self._queue) >= int(num_running * self._policy.waiting_served_ratio)

    def _claim(self, running: Mapping[int, Running]) -> Claim | None:
        most = max((request.tenant.owner.num_running for request in running.values()), default=0)
        request = self._queue.shut_out(most)
        if request is None:
            return None
        owner = request.tenant.owner
        if owner.is_owed_by(most):
            return Claim(request, True, most)
        mates = (r.tenant.num_running for r in running.values() if r.tenant.owner is owner)
        return Claim(request, False, max(mates, default=0))  # default: its mates may all have joined in this step

    def _owed(self, running: Mapping[int, Running]) -> Running | None:
        """The request that a crowding account owes a place. None while a suspect waits: the suspect goes first."""
        again, claim = self._queue.again(), self._claim(running)
        if claim is None or (again is not None and again.blame.runs_alone):
            return None
        return claim.request if claim.most > CROWD * len(running) else None

    def _take(self, running: dict[int, Running], owed: Running | None) -> list[Running]:
        """Starts as many requests as fit, adds them to `running`, and returns them."""
        joined: list[Running] = []
        prefilling = [r for r in running.values() if r.prefilled < r.prefill_to]
        if self.suspect(running) is not None:
            return joined
        if len(running) >= self._limits.max_running:
            self._blame("rows")
            return joined
        skipped: set[int] = set()
        for request in chain(self._first(owed), self._queue.candidates(skipped)):
            if request.blame.runs_alone and (joined or prefilling):
                break
            obstacle = self._obstacle(request, running, [*prefilling, *joined])
            if obstacle is None:
                self._start(request)
                joined.append(request)
                running[request.id] = request
            else:
                self._blame(obstacle, request)
                skipped.add(request.id)
            if obstacle not in (None, "prefix") or request.blame.runs_alone or len(joined) + len(skipped) >= WINDOW:
                break
        return joined

    def _obstacle(self, request: Running, running: Mapping[int, Running], prefilling: list[Running]) -> str | None:
        """What the request has to wait for. None: nothing, and the request now holds its cached prefix."""
        memory, budget = self._memory, self._limits.max_batch_prefill_tokens
        if len(running) >= self._limits.max_running:
            return "rows"
        if memory.should_wait(request):
            return "prefix"
        promised = sum(guaranteed_share(r.num_uncomputed, budget) for r in prefilling)
        if promised + guaranteed_share(request.num_tokens - memory.cached_length_now(request), budget) > budget:
            return "budget"
        memory.hold(request)
        if self._forecast.admits(request, running.values(), prefilling, self._forwards) or self._is_alone(request):
            return None
        memory.let_go(request)
        self._retry_at = self._forwards + RETRY_STEPS
        self._missing = self._forecast.missing
        return "memory"

    def _first(self, owed: Running | None) -> list[Running]:
        """The request tried before all others: the one others were preempted for, else the one owed a place."""
        if self._favoured is not None and (self._favoured.ended or self._favoured.holding is not None):
            self._favoured = None
        first = self._favoured or owed
        return [] if first is None else [first]

    def _make_room(self, running: Mapping[int, Running]) -> None:
        """Preempts for a request that is owed a place. Owners with more than twice as many running requests as its
        owner pay; if its tenant has none running, tenants of the same owner with several."""
        if self._victims:
            return  # the slots of the last victims are not free yet
        claim = self._claim(running)
        if claim is None:
            return
        request = claim.request
        payers = [r for r in running.values() if claim.between_owners or r.tenant.owner is request.tenant.owner]
        places = Counter(claim.account_of(r) for r in payers)
        missing = request.num_tokens + int(self._admission.expect(request).mean()) - self._memory.num_available
        by_cost = sorted(payers, key=lambda r: (*claim.crowding(r), self._memory.num_exclusive(r), -r.id))
        victims: list[Running] = []
        for victim in by_cost:
            if victims and missing <= 0:
                break
            payer = claim.account_of(victim)
            if claim.account.is_owed_by(places[payer]) and self._may_be_sent_away(victim, request):
                places[payer] -= 1
                missing -= self._memory.num_exclusive(victim)
                victims.append(victim)
        if victims:
            self._favoured, self._victims = request, victims
            self._preempted += victims
        else:
            self._retry_at = min(self._retry_at, self._forwards + 1)  # FEWEST_TOKENS may be reached by then

    def _may_be_sent_away(self, victim: Running, request: Running) -> bool:
        """Whether `victim` may be preempted for another tenant's `request`: not before it has made FEWEST_TOKENS tokens
        since it joined, and, where priorities count between tenants, not for a request of worse priority."""
        return (
            (victim.request.priority >= request.request.priority or not self._policy.priority_between_tenants)
            and victim.num_sent - victim.num_sent_at_start >= FEWEST_TOKENS
            and victim not in self._preempted
            and not victim.is_ending
        )

    def _is_alone(self, request: Running) -> bool:
        """Whether only `request` holds slots. It fits then: the server rejects requests that do not fit alone."""
        return self._memory.num_held == self._memory.num_exclusive(request)

    def _start(self, request: Running) -> None:
        self._queue.take(request, request.num_uncomputed)
        self._memory.forget_match(request)
        self._memory.add(request, request.num_uncomputed)
        self._memory.announce(request)
        if request.blame.runs_alone:
            self._suspect = request
        request.begin(self._admission.expect(request))
        self._admission.join(request)

    def _blame(self, reason: str, request: Running | None = None) -> None:
        request = request or next(self._queue.waiting(), None)
        if request is not None:
            request.waited_for = reason
