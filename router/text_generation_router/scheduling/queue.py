"""Requests that wait, and whose turn it is.

Requests that have run before come first, by arrival, and while one of them waits no new one joins. Of the new ones goes
first the owner that has been served the fewest tokens (the virtual token counter); within it, the tenant that has been
served the fewest; within that, the lower `priority`; then the longest cached prefix among the first few; then arrival.
None is overtaken for ever. Where priorities count between tenants, the lower priority comes before the owners.
"""

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterator

from text_generation_router.scheduling.lines import FairLines, Priorities
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.share import Share
from text_generation_router.scheduling.tenant import OUTPUT_WEIGHT, Accounts

# Tenants without requests whose counters are remembered.
MAX_IDLE_TENANTS = 10_000


class Queue:
    """`cached_length` says how much of a request need not be computed."""

    def __init__(self, cached_length: Callable[[Running], int], priority_between_tenants: bool = False) -> None:
        self.num_tokens = 0  # of all that wait
        self._cached_length = cached_length
        self._priority_between_tenants = priority_between_tenants
        self._again: list[Running] = []  # have run before, by arrival
        self._new: OrderedDict[int, Running] = OrderedDict()  # the others, by arrival
        self._accounts = Accounts(MAX_IDLE_TENANTS)
        # By priority, where that counts between tenants; else there is one class at most.
        self._classes: Priorities[FairLines] = Priorities()

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def waiting(self) -> Iterator[Running]:
        yield from self._again
        yield from self._new.values()

    def has_room(self, share: Share, tokens: int, most: int) -> bool:
        """Whether a request of `tokens` tokens may wait, where `most` tokens may. When they do, a share that has less
        than its equal part of them is let in all the same: who floods the queue does not shut others out."""
        return self.num_tokens + tokens <= most or self._accounts.may_wait(share, tokens, most)

    def append(self, request: Running) -> None:
        tenant = request.tenant = self._accounts.tenant(request.request.share)
        self._restore()
        # Nobody saves anything up while it asks for nothing.
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

    def put_back(self, request: Running) -> None:
        """One that has run: before all that arrived later, but for those that a loss counts against."""
        bisect.insort(self._again, request, key=lambda waiting: waiting.blame.turn(waiting.id))
        request.tenant.waits(request.num_tokens)
        self.num_tokens += request.num_tokens

    def remove(self, request: Running) -> None:
        self.num_tokens -= request.num_tokens
        request.tenant.waits_no_longer(request.num_tokens)
        if self._new.pop(request.id, None) is None:
            self._again.remove(request)
            return
        lines = self._classes[self._class_of(request)]
        lines.remove(request)
        if not lines.owners:
            self._classes.remove(self._class_of(request))

    def take(self, request: Running, computed: int) -> None:
        """It joins, and `computed` tokens of its history will be computed."""
        if request.id in self._new:
            self._classes[self._class_of(request)].note_joined(request)
            self._classes.note_joined(self._class_of(request))
        self.remove(request)
        request.tenant.starts()
        request.tenant.serve(computed)
        self._accounts.note_served(request.tenant)

    def left(self, request: Running) -> None:
        """It runs no longer."""
        request.tenant.stops()

    def served(self, request: Running, tokens: int = 1) -> None:
        """It has made tokens."""
        request.tenant.serve(OUTPUT_WEIGHT * tokens)

    def again(self) -> Running | None:
        """The first of those that have run before and can go on."""
        return next(self._may_go_on(), None)

    def _may_go_on(self) -> Iterator[Running]:
        return (request for request in self._again if not request.paused)

    def shut_out(self, most: int) -> Running | None:
        """The first request, in the class whose turn it is, of an owner that is owed a place by the owner with `most`
        running requests; else of a tenant that has nothing running while others of its owner have several requests
        running."""
        self._restore()
        return self._classes.first().shut_out(most) if self._classes else None

    @property
    def somebody_may_go_on(self) -> bool:
        return bool(self._new) or self.again() is not None

    def candidates(self, skipped: set[int]) -> Iterator[Running]:
        """Who may join, in this order; the caller takes each (see `take`), or adds it to `skipped`, or stops."""
        while self.again() is not None:
            request = next((request for request in self._may_go_on() if request.id not in skipped), None)
            if request is None:
                return
            yield request
        self._restore()
        for lines in self._classes.in_turn():
            yield from lines.in_turn(self._cached_length, lambda r: r.id in skipped or r.id not in self._new)

    def _restore(self) -> None:
        for lines in self._classes:
            lines.restore()

    def _lowest_owner(self) -> float:
        """The counter of the waiting owner that was served least."""
        firsts = (lines.owners.first() for lines in self._classes)
        return min((first.account.served for first in firsts if first is not None), default=self._accounts.floor)

    def _lowest_tenant(self, owner: str, floor: float) -> float:
        """The counter of the waiting tenant of `owner` that was served least."""
        waiting = (lines.owners.get(owner) for lines in self._classes)
        firsts = (lines.tenants.first() for lines in waiting if lines is not None)
        return min((first.account.served for first in firsts if first is not None), default=floor)
