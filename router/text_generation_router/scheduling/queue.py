"""Requests that wait, and whose turn it is.

Those that have run before come first, by arrival, and while one of them waits nobody else joins. Among the others a
lower `priority` goes first; within one, the tenant that has been served the fewest tokens (the virtual token counter);
within a tenant, the longest cached prefix among the first few, then arrival. Nobody is passed over for ever.
"""

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.share import Share
from text_generation_router.scheduling.tenant import OUTPUT_WEIGHT, Tenant

# Among so many of a tenant's first requests, and in so many at most of all in a step, cached prefixes are looked for.
WINDOW = 32
# Whom so many have passed, of its own tenant or of better priorities, goes before them.
MAX_PASSED = 256
# Tenants without requests whose counters are remembered.
MAX_IDLE_TENANTS = 10_000


class Line:
    """What one tenant waits for, in one class of priority."""

    __slots__ = ("passed", "requests")

    def __init__(self) -> None:
        self.requests: OrderedDict[int, Running] = OrderedDict()  # by arrival
        self.passed = 0  # how many have joined since the first one is the first

    def in_turn(self, cached_length: Callable[[Running], int]) -> list[Running]:
        """The first few, the best one last."""
        first = list(islice(self.requests.values(), WINDOW))
        by_length = sorted(first, key=lambda r: (cached_length(r), -r.id))
        return [*by_length, first[0]] if self.passed >= MAX_PASSED else by_length


class Queue:
    """`cached_length` says how much of a request need not be computed."""

    def __init__(self, cached_length: Callable[[Running], int]) -> None:
        self.num_tokens = 0  # of all that wait
        self._cached_length = cached_length
        self._again: list[Running] = []  # have run before, by arrival
        self._new: OrderedDict[int, Running] = OrderedDict()  # the others, by arrival
        self._tenants: dict[Share, Tenant] = {}
        self._classes: dict[int, dict[Tenant, Line]] = {}  # priority → its tenants that wait
        self._passed: dict[int, int] = {}  # priority → how many of better ones have joined since one of it did
        self._floor = 0.0  # the counter of who was served last

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def waiting(self) -> Iterator[Running]:
        yield from self._again
        yield from self._new.values()

    def append(self, request: Running) -> None:
        tenant = request.tenant = self._tenant(request.request.share)
        if not tenant.num_waiting:
            # It saves nothing up while it asks for nothing.
            tenant.served = max(tenant.served, self._lowest())
        tenant.num_waiting += 1
        tenants = self._classes.setdefault(request.request.priority, {})
        tenants.setdefault(tenant, Line()).requests[request.id] = request
        self._new[request.id] = request
        self.num_tokens += request.num_tokens

    def put_back(self, request: Running) -> None:
        """One that has run: before everything that arrived later, but for suspects, which let the others go first."""
        bisect.insort(self._again, request, key=lambda waiting: (waiting.blame.turn, waiting.id))
        request.tenant.num_waiting += 1
        self.num_tokens += request.num_tokens

    def remove(self, request: Running) -> None:
        self.num_tokens -= request.num_tokens
        tenant, priority = request.tenant, request.request.priority
        tenant.num_waiting -= 1
        if self._new.pop(request.id, None) is None:
            self._again.remove(request)
            return
        tenants = self._classes[priority]
        line = tenants[tenant]
        if next(iter(line.requests)) == request.id:
            line.passed = 0
        del line.requests[request.id]
        if not line.requests:
            del tenants[tenant]
        if not tenants:
            del self._classes[priority]
            self._passed.pop(priority, None)

    def take(self, request: Running, computed: int) -> None:
        """It joins, and `computed` tokens of its history will be computed."""
        if request.id in self._new:
            self._note_passed(request)
        self.remove(request)
        request.tenant.num_running += 1
        request.tenant.served += computed
        self._floor = request.tenant.served

    def left(self, request: Running) -> None:
        """It runs no longer."""
        request.tenant.num_running -= 1

    def served(self, request: Running, tokens: int = 1) -> None:
        """It has made tokens."""
        request.tenant.served += OUTPUT_WEIGHT * tokens

    def again(self) -> Running | None:
        """The first of those that have run before and can go on."""
        return next(self._may_go_on(), None)

    def _may_go_on(self) -> Iterator[Running]:
        return (request for request in self._again if not request.paused)

    def _note_passed(self, request: Running) -> None:
        """Who could have joined instead."""
        priority = request.request.priority
        self._classes[priority][request.tenant].passed += 1
        self._passed[priority] = 0
        for other in self._classes:
            if other > priority:
                self._passed[other] = self._passed.get(other, 0) + 1

    def shut_out(self) -> Running | None:
        """The first request of somebody who has nothing running, in the class whose turn it is."""
        if not self._classes:
            return None
        tenants = self._classes[min(self._classes)]
        tenant = min((tenant for tenant in tenants if not tenant.num_running), key=_turn, default=None)
        return next(iter(tenants[tenant].requests.values())) if tenant is not None else None

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
        for priority in sorted(self._classes, key=lambda p: (self._passed.get(p, 0) < MAX_PASSED, p)):
            yield from self._of_class(priority, skipped)

    def _of_class(self, priority: int, skipped: set[int]) -> Iterator[Running]:
        """Tenants in turn, which changes with each that joins."""
        lines = self._classes.get(priority, {})
        turns = [(*_turn(tenant), i, tenant) for i, tenant in enumerate(lines)]
        heapq.heapify(turns)
        orders: dict[Tenant, list[Running]] = {}
        while turns:
            *_, i, tenant = heapq.heappop(turns)
            if tenant not in orders:
                orders[tenant] = lines[tenant].in_turn(self._cached_length)
            order = orders[tenant]
            while order and (order[-1].id in skipped or order[-1].id not in self._new):
                order.pop()
            if order:
                yield order[-1]
                heapq.heappush(turns, (*_turn(tenant), i, tenant))

    def _lowest(self) -> float:
        """The counter of the waiting tenant that was served least."""
        return min((tenant.served for tenants in self._classes.values() for tenant in tenants), default=self._floor)

    def _tenant(self, share: Share) -> Tenant:
        if share not in self._tenants:
            self._forget_idle()
            self._tenants[share] = Tenant(share, self._floor)
        return self._tenants[share]

    def _forget_idle(self) -> None:
        if len(self._tenants) < MAX_IDLE_TENANTS:
            return
        for share in [
            share for share, tenant in self._tenants.items() if not (tenant.num_waiting or tenant.num_running)
        ]:
            del self._tenants[share]


def _turn(tenant: Tenant) -> tuple[float, int]:
    """Fewest tokens first; at a tie who has fewest requests running."""
    return tenant.served, tenant.num_running
