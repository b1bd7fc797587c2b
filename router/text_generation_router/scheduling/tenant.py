"""Accounts of owners and their tenants: tokens served, and numbers of running and waiting requests."""

from math import inf

from text_generation_router.scheduling.request import Share

# A generated token is charged as two prompt tokens, which is about its cost (Sheng et al., VTC).
OUTPUT_WEIGHT = 2


class Account:
    """Counts of one owner or tenant. The virtual token counter `served` never falls. It includes what other engines
    have served, and what an account without requests was lifted by; `total` is what this engine has served.

    What other engines serve is told while requests wait here. It must not put those requests off again and again, so
    it counts when a request joins, or when the account begins to wait; and then by a limited lead."""

    __slots__ = ("num_running", "num_waiting", "served", "total", "uncounted", "waiting_tokens")

    def __init__(self, served: float) -> None:
        self.served = served
        self.total = 0.0
        self.uncounted = 0.0  # tokens that other engines have served and that are not part of `served` yet
        self.num_running = 0
        self.num_waiting = 0
        self.waiting_tokens = 0  # number of prompt and output tokens of the waiting requests

    def count_elsewhere(self, most: float) -> None:
        """Counts what other engines have served, as long as `served` is at most `most`. The rest is forgiven."""
        self.served = max(self.served, min(self.served + self.uncounted, most))
        self.uncounted = 0.0

    def may_wait(self, tokens: int, part: int) -> bool:
        """Whether a request of `tokens` tokens may wait, if the account's waiting requests may have `part` tokens in
        all. If no other request of the account waits, the answer is always yes.
        """
        return not self.num_waiting or self.waiting_tokens + tokens <= part

    def is_owed_by(self, running: int) -> bool:
        """Whether an account with `running` running requests gives up one of them for this account. The rest must be
        more than twice the running requests of this account. With a smaller factor, accounts of about the same size
        would preempt each other's requests in turn.
        """
        return running - 1 > 2 * self.num_running

    @property
    def is_idle(self) -> bool:
        return not (self.num_running or self.num_waiting)


class Owner(Account):
    """The account of an owner: its counts are sums over its tenants."""

    __slots__ = ("floor", "num_tenants_running", "num_tenants_waiting", "tenants")

    def __init__(self, served: float) -> None:
        super().__init__(served)
        self.tenants: dict[str, Tenant] = {}  # tenants by name; idle tenants are kept for their counters
        self.num_tenants_running = 0
        self.num_tenants_waiting = 0
        self.floor = 0.0  # `served` of the tenant whose request joined last; a new tenant begins with it


class Tenant(Account):
    __slots__ = ("elsewhere", "owner")

    def __init__(self, owner: Owner, served: float = 0.0, elsewhere: float = 0.0) -> None:
        super().__init__(served)
        self.owner = owner
        self.elsewhere = elsewhere  # the largest number of tokens that other engines were said to have served

    def note_elsewhere(self, tokens: float) -> None:
        """Notes that other engines have served `tokens` tokens in all. Numbers that were told before change nothing."""
        if (more := tokens - self.elsewhere) > 0:
            self.elsewhere = tokens
            self.uncounted += more
            self.owner.uncounted += more

    @property
    def is_crowded_out(self) -> bool:
        """Whether this tenant has no running request, while another tenant of its owner has several."""
        return not self.num_running and self.owner.num_running > self.owner.num_tenants_running

    def waits(self, tokens: int) -> None:
        """Counts one more waiting request of this tenant, with `tokens` tokens."""
        self.owner.num_tenants_waiting += not self.num_waiting
        for account in (self, self.owner):
            account.num_waiting += 1
            account.waiting_tokens += tokens

    def waits_no_longer(self, tokens: int) -> None:
        for account in (self, self.owner):
            account.num_waiting -= 1
            account.waiting_tokens -= tokens
        self.owner.num_tenants_waiting -= not self.num_waiting

    def starts(self) -> None:
        """Counts a request of this tenant as running and no longer as waiting."""
        self.owner.num_tenants_running += not self.num_running
        self.num_running += 1
        self.owner.num_running += 1

    def stops(self) -> None:
        self.num_running -= 1
        self.owner.num_running -= 1
        self.owner.num_tenants_running -= not self.num_running

    def serve_prompt(self, tokens: int) -> None:
        self.served += tokens
        self.total += tokens
        self.owner.served += tokens

    def serve_output(self, tokens: int) -> None:
        weighed = OUTPUT_WEIGHT * tokens
        self.served += weighed
        self.total += weighed
        self.owner.served += weighed


class Accounts:
    """The accounts of all owners and tenants with requests. Of tenants without requests, at most `max_idle` are
    kept.
    """

    def __init__(self, max_idle: int) -> None:
        self.owners: dict[str, Owner] = {}
        self.floor = 0.0  # `served` of the owner whose request joined last; a new owner begins with it
        # Tokens by which service of other engines may put an account before the account whose request joined last. The
        # first accounts have no other one to be compared with.
        self.max_lead = inf
        self._max_idle = max_idle
        self._num_tenants = 0

    def find(self, share: Share) -> Tenant | None:
        owner = self.owners.get(share.owner)
        return owner.tenants.get(share.tenant) if owner is not None else None

    def tenant(self, share: Share, elsewhere: float = 0.0) -> Tenant:
        """The account of `share`, made if there is none. `elsewhere`: tokens that other engines have served to it."""
        if (tenant := self.find(share)) is not None:
            tenant.note_elsewhere(elsewhere)
            return tenant
        if self._num_tenants >= self._max_idle:
            self._forget_idle()
        if (owner := self.owners.get(share.owner)) is None:
            owner = self.owners[share.owner] = Owner(max(self.floor, min(elsewhere, self._most(self.floor))))
        else:
            owner.uncounted += elsewhere
        served = max(owner.floor, min(elsewhere, self._most(owner.floor)))
        tenant = owner.tenants[share.tenant] = Tenant(owner, served, elsewhere)
        self._num_tenants += 1
        return tenant

    def _most(self, floor: float) -> float:
        return floor + self.max_lead if floor else inf

    def begin_to_wait(self, tenant: Tenant) -> None:
        """Counts what other engines have served before a request of `tenant` waits."""
        owner = tenant.owner
        if not owner.num_waiting:
            owner.count_elsewhere(self._most(self.floor))
        if not tenant.num_waiting:
            tenant.count_elsewhere(self._most(owner.floor))

    def note_served(self, tenant: Tenant) -> None:
        """Notes that a request of `tenant` joined just now: new owners and tenants begin with its counters."""
        owner = tenant.owner
        owner.floor, self.floor = tenant.served, owner.served
        owner.count_elsewhere(self._most(self.floor))
        tenant.count_elsewhere(self._most(owner.floor))

    def may_wait(self, share: Share, tokens: int, most: int) -> bool:
        """Whether `tokens` more waiting tokens are within the equal part of `most` that belongs to `share`. Owners with
        waiting requests have equal parts, and within an owner its tenants with waiting requests.
        """
        owner = self.owners.get(share.owner)
        if owner is None or not owner.num_waiting:
            return True
        part = most // self._num_owners_waiting()
        if not owner.may_wait(tokens, part):
            return False
        tenant = owner.tenants.get(share.tenant)
        is_new = tenant is None or not tenant.num_waiting
        return tenant is None or tenant.may_wait(tokens, part // (owner.num_tenants_waiting + is_new))

    def _num_owners_waiting(self) -> int:
        return sum(owner.num_waiting > 0 for owner in self.owners.values())

    def _forget_idle(self) -> None:
        for owner in self.owners.values():
            owner.tenants = {name: tenant for name, tenant in owner.tenants.items() if not tenant.is_idle}
        self.owners = {name: owner for name, owner in self.owners.items() if owner.tenants}
        self._num_tenants = sum(len(owner.tenants) for owner in self.owners.values())
