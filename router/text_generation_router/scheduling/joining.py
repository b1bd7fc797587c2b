"""Who joins the running batch, and when.

TGI's rule says when: at once if nothing runs; else when enough wait for those that run, or after enough decode steps.
Whoever's turn it is then joins, as long as rows, memory and the step's budget of prompt tokens last. Nobody overtakes
one for whom they do not. A request that one crowding owner or tenant owes a place waits for neither the rule nor its
turn.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from text_generation_router.scheduling.admission import AdmissionControl, Forecast
from text_generation_router.scheduling.chunks import guaranteed_share
from text_generation_router.scheduling.limits import Limits
from text_generation_router.scheduling.lines import WINDOW
from text_generation_router.scheduling.memory import Memory
from text_generation_router.scheduling.queue import Queue
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.tenant import Account

# One who does not fit is looked at again when others have given back what was missing, or after so many steps.
RETRY_STEPS = 8
# A request that makes room for another tenant's has made this many tokens since it joined, or more.
FEWEST_TOKENS = 4
# An account crowds the others if more than this part of the running requests are its own.
CROWD = 0.25


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that is owed a place: by another owner, or by another tenant of its own owner."""

    request: Running
    between_owners: bool
    most: int  # running requests of the account that has most of those that owe it

    def account_of(self, running: Running) -> Account:
        """Who gives up a place if it makes room."""
        return running.tenant.owner if self.between_owners else running.tenant

    @property
    def account(self) -> Account:
        return self.account_of(self.request)

    def crowding(self, victim: Running) -> tuple[int, int]:
        """Those who have most running make room first."""
        return -victim.tenant.owner.num_running if self.between_owners else 0, -victim.tenant.num_running


class Joining:
    def __init__(self, limits: Limits, memory: Memory, queue: Queue, admission: AdmissionControl) -> None:
        self.reason: str | None = None  # why the last ones joined running ones, in TGI's words
        self._limits = limits
        self._memory = memory
        self._queue = queue
        self._admission = admission
        self._forecast = Forecast(admission, memory, limits.max_batch_prefill_tokens)
        self._preempted: list[Running] = []
        self._waiting_tokens = 0  # decode steps since somebody joined
        self._forwards = 0
        self._retry_at = 0  # until then nobody fits, unless others give back
        self._missing = 0  # so many slots
        self._favoured: Running | None = None  # others make room for it, and
        self._victims: list[Running] = []  # these are they
        self._suspect: Running | None = None  # the last request that started to run alone

    def note_forward(self, steps: int, decodes: bool) -> None:
        """`decodes`: those who run make a token in each, whether it carries chunks or not."""
        self._forwards += steps
        if decodes:
            self._waiting_tokens += steps

    def retry(self, slots: int) -> None:
        """So many have been given back."""
        self._missing -= slots
        made_room = bool(self._victims) and all(victim.holding is None for victim in self._victims)
        if made_room:
            self._victims = []
        if self._missing <= 0 or made_room:
            self._retry_at = 0

    def retry_now(self) -> None:
        """Somebody has come who is not to wait for that."""
        self._retry_at = 0

    def take_preempted(self) -> list[Running]:
        """Running requests that have to make room."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def quiet_steps(self, running: Mapping[int, Running]) -> int:
        """For how many decode steps nobody joins, whatever happens in them. `running` pause not and prefill not."""
        if not len(self._queue):
            return self._limits.capacity
        if len(running) >= self._limits.max_running and self._claim(running) is None:
            return self._limits.capacity
        if (again := self._queue.again()) is not None and again.blame.runs_alone:
            return 0
        if not self._are_enough(len(running)) and self._owed(running) is None:
            return max(0, self._limits.max_waiting_tokens - self._waiting_tokens)
        return max(0, self._retry_at - self._forwards)

    def choose(self, running: Mapping[int, Running]) -> list[Running]:
        """Takes them out of the queue, and memory for their histories."""
        self._memory.begin_step()
        if not len(self._queue):
            return []
        num_active = sum(not request.paused for request in running.values())
        if num_active and self._forwards < self._retry_at:
            return []
        again = self._queue.again()
        # A suspect starts as soon as it can: it has waited enough.
        waited = self._waiting_tokens >= self._limits.max_waiting_tokens or bool(again and again.blame.runs_alone)
        owed = self._owed(running)
        if num_active and owed is None and not waited and not self._are_enough(num_active):
            self._blame("rule")
            return []
        joined = self._take(dict(running), owed)
        if self._forwards < self._retry_at or len(running) >= self._limits.max_running:
            # Nobody who can go on waits for slow readers: they would not notice that they wait themselves.
            if self._queue.somebody_may_go_on:
                self._preempted = [request for request in running.values() if request.paused]
            self._make_room(running)
        if joined:
            # Tested here, where it is known: TGI counts who joined, and why, only where others were running.
            self.reason = ("wait_exceeded" if waited else "backpressure") if num_active else None
        if any(request is not owed for request in joined):
            self._waiting_tokens = 0  # a request that is owed a place makes the others wait no longer
        return joined

    def suspect(self, running: Mapping[int, Running]) -> Running | None:
        """The request that runs alone, if there is one. The rows of the others rest meanwhile."""
        request = self._suspect
        if request is not None and not (request.blame.runs_alone and request.id in running):
            request = self._suspect = None
        return request

    def _are_enough(self, num_running: int) -> bool:
        return len(self._queue) >= int(num_running * self._limits.waiting_served_ratio)

    def _claim(self, running: Mapping[int, Running]) -> Claim | None:
        most = max((request.tenant.owner.num_running for request in running.values()), default=0)
        request = self._queue.shut_out(most)
        if request is None:
            return None
        owner = request.tenant.owner
        if owner.is_owed_by(most):
            return Claim(request, True, most)
        mates = (r.tenant.num_running for r in running.values() if r.tenant.owner is owner)
        return Claim(request, False, max(mates, default=0))  # all of them may have joined just now

    def _owed(self, running: Mapping[int, Running]) -> Running | None:
        """The request that one account, which crowds all others, owes a place. A suspect that waits goes before it."""
        again, claim = self._queue.again(), self._claim(running)
        if claim is None or (again is not None and again.blame.runs_alone):
            return None
        return claim.request if claim.most > CROWD * len(running) else None

    def _take(self, running: dict[int, Running], owed: Running | None) -> list[Running]:
        """Those who join are among `running` from then on."""
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
        """What it has to wait for. None: nothing, and it holds what the cache has of it."""
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
        """Before everybody else: the one that others made room for, else the one that is owed a place."""
        if self._favoured is not None and (self._favoured.ended or self._favoured.holding is not None):
            self._favoured = None
        first = self._favoured or owed
        return [] if first is None else [first]

    def _make_room(self, running: Mapping[int, Running]) -> None:
        """An owner gets a place at once from an owner that has many more running requests; a tenant that has nothing
        running, from a tenant of the same owner that has several."""
        if self._victims:
            return  # what they hold is on its way
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
            self._retry_at = min(self._retry_at, self._forwards + 1)  # somebody may soon have got somewhere

    def _may_be_sent_away(self, victim: Running, request: Running) -> bool:
        """For the sake of another tenant's `request`; not again before it has got somewhere, and not by one that
        matters less, where priorities count between tenants."""
        return (
            (victim.request.priority >= request.request.priority or not self._limits.priority_between_tenants)
            and victim.num_sent - victim.num_sent_at_start >= FEWEST_TOKENS
            and victim not in self._preempted
            and not victim.is_ending
        )

    def _is_alone(self, request: Running) -> bool:
        """Nobody holds anything but itself. It fits, then: others are not even queued."""
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
