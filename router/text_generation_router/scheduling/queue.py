"""The waiting requests, and the order in which they join.

Requests that have run on this engine come first: streams whose keys and values have outlived a loss, or the engine
before this one; then what a loss has stopped, the earliest loss first; then the others by age. While one of all these
waits no other request joins. The next request belongs to the owner that has been served the fewest tokens (the virtual
token counter), and to the tenant of this owner that has been served the fewest. Within the tenant, requests that have
run on another engine go first, by age; then the lower `priority`, then the longest cached prefix among the first WINDOW
requests, then age. No request waits for ever because others overtake it. Where priorities count between tenants, the
lower priority comes before the order of owners.
"""

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from text_generation_router.scheduling.blame import Turn
from text_generation_router.scheduling.lines import FairLines, Priorities
from text_generation_router.scheduling.request import Share
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.tenant import Accounts, Tenant

# Number of tenants without requests whose counters are remembered.
MAX_IDLE_TENANTS = 10_000


class Queue:
    def __init__(self, priority_between_tenants: bool = False) -> None:
        # Whether a request may join now, or has to wait for its adapter and holds up no other one.
        self.admits: Callable[[Running], bool] = lambda _: True
        self.num_tokens = 0  # number of prompt and output tokens of all waiting requests
        self._priority_between_tenants = priority_between_tenants
        self._resuming: list[Running] = []  # requests that have run on this engine, by blame and age
        # Requests that have not run here yet, by id, in order of submission.
        self._new: OrderedDict[int, Running] = OrderedDict()
        self._accounts = Accounts(MAX_IDLE_TENANTS)
        # A class for each priority where priorities count between tenants; otherwise one class.
        self._classes: Priorities[FairLines] = Priorities()

    def __len__(self) -> int:
        return len(self._resuming) + len(self._new)

    def waiting(self) -> Iterator[Running]:
        yield from self._resuming
        yield from self._new.values()

    @property
    def num_tenants_running(self) -> int:
        return sum(owner.num_tenants_running for owner in self._accounts.owners.values())

    @property
    def num_tenants_waiting(self) -> int:
        return sum(owner.num_tenants_waiting for owner in self._accounts.owners.values())

    def has_room(self, share: Share, tokens: int, most: int) -> bool:
        """Whether a request of `tokens` tokens may wait, if at most `most` waiting tokens are allowed. Even beyond
        `most`, a request is accepted while its owner or tenant has less than an equal part of `most`. So no client can
        block the others by flooding the queue.
        """
        return self.num_tokens + tokens <= most or self._accounts.may_wait(share, tokens, most)

    def limit_lead(self, tokens: float) -> None:
        """From now on, service of other engines puts an owner or tenant behind the others here by at most `tokens`."""
        self._accounts.max_lead = tokens

    def account(self, share: Share) -> Tenant | None:
        return self._accounts.find(share)

    def append(self, request: Running) -> None:
        tenant = request.tenant = self._accounts.tenant(request.request.share, request.past.served_elsewhere)
        self._accounts.begin_to_wait(tenant)
        self._restore()
        # An idle tenant or owner earns no credit: its counter is lifted to the lowest waiting one (VTC).
        if not tenant.owner.num_waiting:
            tenant.owner.served = max(tenant.owner.served, self._lowest_owner())
        if not tenant.num_waiting:
            tenant.served = max(tenant.served, self._lowest_tenant(request.request.share.owner, tenant.owner.floor))
        tenant.waits(request.num_tokens)
        self._classes.get(self._class_of(request), FairLines).add(request)
        self._new[request.id] = request
        self.num_tokens += request.num_tokens

    def _class_of(self, request: Running) -> int:
        return request.request.priority if self._priority_between_tenants else 0

    def put_back(self, request: Running, is_kept: bool = False) -> None:
        """Adds a request that has run on this engine, or goes on with one token (`is_kept`), in order of blame and age
        (see `Blame.turn`)."""
        request.is_kept = is_kept
        bisect.insort(self._resuming, request, key=_order_of_resuming)
        request.tenant.waits(request.num_tokens)
        self.num_tokens += request.num_tokens

    def put_streams_first(self, waiting: Iterable[Running], is_kept: Callable[[Running], bool]) -> None:
        """Has waiting requests go before the others if `is_kept`: they go on with one token each."""
        for request in waiting:
            if request.is_kept != (is_now := is_kept(request)):
                self.remove(request)
                self.put_back(request, is_now)

    def remove(self, request: Running) -> None:
        self.num_tokens -= request.num_tokens
        request.tenant.waits_no_longer(request.num_tokens)
        if self._new.pop(request.id, None) is None:
            self._resuming.remove(request)
            return
        lines = self._classes[self._class_of(request)]
        lines.remove(request)
        if not lines.owners:
            self._classes.remove(self._class_of(request))

    def join(self, request: Running, computed: int) -> None:
        """Removes a request that starts to run. `computed`: number of tokens of its history that will be computed."""
        if request.id in self._new:
            self._classes[self._class_of(request)].note_joined(request)
            self._classes.note_joined(self._class_of(request))
        self.remove(request)
        request.tenant.starts()
        request.tenant.serve_prompt(computed)
        self._accounts.note_served(request.tenant)

    def stop(self, request: Running) -> None:
        """Notes that the request runs no longer."""
        request.tenant.stops()

    def first_to_resume(self) -> Running | None:
        """The first waiting request that has run on this engine and may join now."""
        return next(self._may_resume(), None)

    def _may_resume(self) -> Iterator[Running]:
        return (request for request in self._resuming if not request.paused and self.admits(request))

    def owed(self, most: int) -> Running | None:
        """In the class whose turn it is, the first request that is owed a place (see `FairLines.owed`). `most`: largest
        number of running requests of an owner.
        """
        self._restore()
        request = self._classes.first().owed(most) if self._classes else None
        return request if request is not None and self.admits(request) else None

    @property
    def has_suspect_next(self) -> bool:
        """Whether the first request to resume has to run alone."""
        first = self.first_to_resume()
        return first is not None and first.blame.runs_alone

    @property
    def has_exempt_next(self) -> bool:
        """Whether the first request to resume is a suspect, or one that a loss has stopped, which had joined before:
        TGI's joining rule does not hold it up."""
        first = self.first_to_resume()
        return first is not None and (first.blame.runs_alone or first.blame.is_replayed)

    @property
    def has_candidates(self) -> bool:
        return bool(self._new) or self.first_to_resume() is not None

    def candidates(self, skipped: set[int], cached_length: Callable[[Running], int]) -> Iterator[Running]:
        """The requests that may join, in order. For each one the caller either lets it join (see `join`), adds its id
        to `skipped`, or stops. `cached_length`: number of a request's first tokens whose keys and values are cached.
        """
        while self.first_to_resume() is not None:
            request = next((request for request in self._may_resume() if request.id not in skipped), None)
            if request is None:
                return
            yield request
        self._restore()
        for lines in self._classes.in_turn():
            yield from lines.in_turn(cached_length, self.admits, lambda r: r.id in skipped or r.id not in self._new)

    def _restore(self) -> None:
        for lines in self._classes:
            lines.restore()

    def _lowest_owner(self) -> float:
        """The lowest counter among the owners with waiting requests."""
        firsts = (lines.owners.first() for lines in self._classes)
        return min((first.account.served for first in firsts if first is not None), default=self._accounts.floor)

    def _lowest_tenant(self, owner: str, floor: float) -> float:
        """The lowest counter among the tenants of `owner` with waiting requests."""
        waiting = (lines.owners.get(owner) for lines in self._classes)
        firsts = (lines.tenants.first() for lines in waiting if lines is not None)
        return min((first.account.served for first in firsts if first is not None), default=floor)


def _order_of_resuming(request: Running) -> tuple[bool, Turn]:
    return not request.is_kept, request.turn
