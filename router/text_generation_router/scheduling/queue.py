"""Requests that wait, and whose turn it is.

Those that have run before come first, by arrival, and while one of them waits nobody else joins. Among the others a
lower `priority` goes first; within one, the tenant that has been served the fewest tokens (the virtual token counter);
within a tenant, the longest cached prefix among the first few, then arrival. Nobody is passed over for ever.
"""

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.tenant import OUTPUT_WEIGHT, Tenant

# Among so many of a tenant's first requests, and in so many at most of all in a step, cached prefixes are looked for.
WINDOW = 32
# A request that so many younger ones have passed goes before all others that have not run yet.
MAX_PASSED = 256
# Tenants without requests whose counters are remembered.
MAX_IDLE_TENANTS = 10_000


class Queue:
    """`cached_length` says how much of a request need not be computed."""

    def __init__(self, cached_length: Callable[[Running], int]) -> None:
        self.num_tokens = 0  # of all that wait
        self._cached_length = cached_length
        self._again: list[Running] = []  # have run before, by arrival
        self._new: OrderedDict[int, Running] = OrderedDict()  # the others, by arrival
        self._due: dict[int, int] = {}  # id → how many must have joined before it goes first
        self._num_joined = 0
        self._tenants: dict[str, Tenant] = {}
        # Priority → its tenants that wait → their requests, by arrival.
        self._classes: dict[int, dict[Tenant, OrderedDict[int, Running]]] = {}
        self._floor = 0.0  # the counter of who was served last

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def waiting(self) -> Iterator[Running]:
        yield from self._again
        yield from self._new.values()

    def append(self, request: Running) -> None:
        tenant = request.tenant = self._tenant(request.request.tenant)
        if not tenant.num_waiting:
            # It saves nothing up while it asks for nothing.
            tenant.served = max(tenant.served, self._lowest())
        tenant.num_waiting += 1
        waiting = self._classes.setdefault(request.request.priority, {}).setdefault(tenant, OrderedDict())
        waiting[request.id] = request
        self._due[request.id] = self._num_joined + len(self._new) + MAX_PASSED
        self._new[request.id] = request
        self.num_tokens += request.num_tokens

    def put_back(self, request: Running) -> None:
        """One that has run: among its like, before everything that arrived later."""
        bisect.insort(self._again, request, key=lambda waiting: waiting.id)
        request.tenant.num_waiting += 1
        self.num_tokens += request.num_tokens

    def remove(self, request: Running) -> None:
        self.num_tokens -= request.num_tokens
        tenant, priority = request.tenant, request.request.priority
        tenant.num_waiting -= 1
        if self._new.pop(request.id, None) is None:
            self._again.remove(request)
            return
        del self._due[request.id]
        tenants = self._classes[priority]
        del tenants[tenant][request.id]
        if not tenants[tenant]:
            del tenants[tenant]
            if not tenants:
                del self._classes[priority]

    def take(self, request: Running, computed: int) -> None:
        """It joins, and `computed` tokens of its history will be computed."""
        if request.id in self._new:
            self._num_joined += 1
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

    def overdue(self) -> Running | None:
        """The oldest, if too many have passed it."""
        request = next(iter(self._new.values()), None)
        return request if request is not None and self._due[request.id] <= self._num_joined else None

    def shut_out(self) -> Running | None:
        """The first request of somebody who has nothing running, in the class whose turn it is."""
        for priority in sorted(self._classes)[:1]:
            tenants = self._classes[priority]
            for tenant in sorted((t for t in tenants if not t.num_running), key=_turn):
                return next(iter(tenants[tenant].values()))
        return None

    def candidates(self, skipped: set[int]) -> Iterator[Running]:
        """Who may join, in this order; the caller takes each (see `take`), or adds it to `skipped`, or stops."""
        orders: dict[tuple[int, Tenant], list[Running]] = {}
        while (request := self._next(skipped, orders)) is not None:
            yield request

    def _next(self, skipped: set[int], orders: dict[tuple[int, Tenant], list[Running]]) -> Running | None:
        if self.again() is not None:
            return next((request for request in self._may_go_on() if request.id not in skipped), None)
        if (request := self.overdue()) is not None and request.id not in skipped:
            return request
        for priority in sorted(self._classes):
            tenants = self._classes[priority]
            for tenant in sorted(tenants, key=_turn):
                if (priority, tenant) not in orders:
                    orders[priority, tenant] = self._by_cached_length(tenants[tenant])
                order = orders[priority, tenant]
                while order and (order[-1].id in skipped or order[-1].id not in self._new):
                    order.pop()
                if order:
                    return order[-1]
        return None

    def _by_cached_length(self, waiting: Mapping[int, Running]) -> list[Running]:
        """The first few, the best one last."""
        return sorted(islice(waiting.values(), WINDOW), key=lambda r: (self._cached_length(r), -r.id))

    def _lowest(self) -> float:
        """The counter of the waiting tenant that was served least."""
        return min((tenant.served for tenants in self._classes.values() for tenant in tenants), default=self._floor)

    def _tenant(self, name: str) -> Tenant:
        if name not in self._tenants:
            self._forget_idle()
            self._tenants[name] = Tenant(name, self._floor)
        return self._tenants[name]

    def _forget_idle(self) -> None:
        if len(self._tenants) < MAX_IDLE_TENANTS:
            return
        for name in [name for name, tenant in self._tenants.items() if not (tenant.num_waiting or tenant.num_running)]:
            del self._tenants[name]


def _turn(tenant: Tenant) -> tuple[float, int]:
    """Fewest tokens first; at a tie who has fewest requests running."""
    return tenant.served, tenant.num_running
