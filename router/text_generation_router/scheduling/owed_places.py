"""Places in the running batch that owners and tenants with too many running requests owe to others, and the requests
that give up these places.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from text_generation_router.scheduling.admission import AdmissionControl
from text_generation_router.scheduling.memory.memory import Memory
from text_generation_router.scheduling.queue import Queue
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.tenant import Account

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
