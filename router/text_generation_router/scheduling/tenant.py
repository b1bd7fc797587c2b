"""What owners and their tenants have been served, and how many requests they have running and waiting."""

from text_generation_router.scheduling.share import Share

# A generated token counts as two tokens of a prompt: about what it costs (Sheng et al., VTC).
OUTPUT_WEIGHT = 2


class Account:
    """The virtual token counter `served` only grows."""

    __slots__ = ("num_running", "num_waiting", "served", "waiting_tokens")

    def __init__(self, served: float) -> None:
        self.served = served
        self.num_running = 0
        self.num_waiting = 0
        self.waiting_tokens = 0  # of the requests that wait

    def may_wait(self, tokens: int, part: int) -> bool:
        """Whether `tokens` more are within its part of what may wait. One request may always wait."""
        return not self.num_waiting or self.waiting_tokens + tokens <= part

    def is_owed_by(self, running: int) -> bool:
        """Whether an account with `running` running requests gives up one of them for this account: the rest is more
        than twice as many as this account has. Were it less, accounts of about the same size would send each other's
        requests away in turn."""
        return running - 1 > 2 * self.num_running

    @property
    def is_idle(self) -> bool:
        return not (self.num_running or self.num_waiting)


class Owner(Account):
    """The sums over its tenants."""

    __slots__ = ("floor", "num_tenants_running", "num_tenants_waiting", "tenants")

    def __init__(self, served: float) -> None:
        super().__init__(served)
        self.tenants: dict[str, Tenant] = {}  # also idle ones, whose counters are remembered
        self.num_tenants_running = 0
        self.num_tenants_waiting = 0
        self.floor = 0.0  # the counter of the tenant that was served last


class Tenant(Account):
    __slots__ = ("owner",)

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner.floor)
        self.owner = owner

    @property
    def is_crowded_out(self) -> bool:
        """It has nothing running, while another tenant of its owner has several requests running."""
        return not self.num_running and self.owner.num_running > self.owner.num_tenants_running

    def waits(self, tokens: int) -> None:
        """One more of its requests waits, of so many tokens."""
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
        """One of its requests has joined."""
        self.owner.num_tenants_running += not self.num_running
        self.num_running += 1
        self.owner.num_running += 1

    def stops(self) -> None:
        self.num_running -= 1
        self.owner.num_running -= 1
        self.owner.num_tenants_running -= not self.num_running

    def serve(self, tokens: float) -> None:
        self.served += tokens
        self.owner.served += tokens


class Accounts:
    """All owners and tenants that have requests, and about `max_idle` of those that have none any more."""

    def __init__(self, max_idle: int) -> None:
        self.owners: dict[str, Owner] = {}
        self.floor = 0.0  # the counter of the owner that was served last
        self._max_idle = max_idle
        self._num_tenants = 0

    def tenant(self, share: Share) -> Tenant:
        owner = self.owners.get(share.owner)
        if owner is not None and (tenant := owner.tenants.get(share.tenant)) is not None:
            return tenant
        if self._num_tenants >= self._max_idle:
            self._forget_idle()
        owner = self.owners.setdefault(share.owner, Owner(self.floor))
        tenant = owner.tenants[share.tenant] = Tenant(owner)
        self._num_tenants += 1
        return tenant

    def note_served(self, tenant: Tenant) -> None:
        """It was served just now: whoever comes anew begins with its counter."""
        tenant.owner.floor = tenant.served
        self.floor = tenant.owner.served

    def may_wait(self, share: Share, tokens: int, most: int) -> bool:
        """Whether `tokens` more are within the share's equal part of `most`: equal for all owners that have requests
        waiting, and within an owner for all its tenants that have."""
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
