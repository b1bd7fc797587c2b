"""Requests that wait, and whose turn it is.

Those that have run before come first, by arrival, and while one of them waits nobody else joins. Among the others a
lower `priority` goes first; within one, the tenant that has been served the fewest tokens (the virtual token counter);
within a tenant, the longest cached prefix among the first few, then arrival. Nobody is passed over for ever.
"""

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from text_generation_router.scheduling.running import Running

# Among so many of a tenant's first requests, and in so many at most of all in a step, cached prefixes are looked for.
WINDOW = 32
# A request that so many younger ones have passed goes before all others that have not run yet.
MAX_PASSED = 256
# Tokens that are made count twice as much as those that are read: about what they cost (Sheng et al., VTC).
OUTPUT_WEIGHT = 2
# Tenants without requests whose counters are remembered.
MAX_IDLE_TENANTS = 10_000


class Tenant:
    """Who shares fairly with others: the tokens it has been served, and what it waits for."""

    __slots__ = ("name", "num_running", "served", "waiting")

    def __init__(self, name: str, served: float) -> None:
        self.name = name
        self.served = served
        self.num_running = 0
        self.waiting: dict[int, OrderedDict[int, Running]] = {}  # priority → id → request


class Queue:
    """`cached_length` says how much of a request need not be computed."""

    def __init__(self, cached_length: Callable[[Running], int]) -> None:
        self.num_tokens = 0  # of all that wait
        self._cached_length = cached_length
        self._again: list[Running] = []  # have run before, by arrival
        self._new: OrderedDict[int, Running] = OrderedDict()  # the others, by arrival
        self._due: dict[int, int] = {}  # id → how many must have joined before it goes first
        self._num_joined = 0
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()
        self._classes: dict[int, dict[str, Tenant]] = {}  # priority → those of its tenants that wait
        self._floor = 0.0  # the counter of who was served last

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def waiting(self) -> Iterator[Running]:
        yield from self._again
        yield from self._new.values()

    def tenant(self, request: Running) -> Tenant:
        name = request.request.tenant
        if name not in self._tenants:
            self._forget_idle()
            self._tenants[name] = Tenant(name, self._floor)
        return self._tenants[name]

    def append(self, request: Running) -> None:
        tenant, priority = self.tenant(request), request.request.priority
        if not tenant.waiting:
            # It saves nothing up while it asks for nothing.
            tenant.served = max(tenant.served, self._lowest())
        tenant.waiting.setdefault(priority, OrderedDict())[request.id] = request
        self._classes.setdefault(priority, {})[tenant.name] = tenant
        self._due[request.id] = self._num_joined + len(self._new) + MAX_PASSED
        self._new[request.id] = request
        self.num_tokens += request.num_tokens

    def put_back(self, request: Running) -> None:
        """One that has run: among its like, before everything that arrived later."""
        bisect.insort(self._again, request, key=lambda waiting: waiting.id)
        self.num_tokens += request.num_tokens

    def remove(self, request: Running) -> None:
        self.num_tokens -= request.num_tokens
        if self._new.pop(request.id, None) is None:
            self._again.remove(request)
            return
        del self._due[request.id]
        priority, tenant = request.request.priority, self.tenant(request)
        del tenant.waiting[priority][request.id]
        if not tenant.waiting[priority]:
            del tenant.waiting[priority]
            del self._classes[priority][tenant.name]
            if not self._classes[priority]:
                del self._classes[priority]

    def take(self, request: Running, computed: int) -> None:
        """It joins, and `computed` tokens of its prompt will be computed."""
        if request.id in self._new:
            self._num_joined += 1
        self.remove(request)
        tenant = self.tenant(request)
        tenant.num_running += 1
        tenant.served += computed
        self._floor = tenant.served

    def left(self, request: Running) -> None:
        """It runs no longer."""
        self.tenant(request).num_running -= 1

    def served(self, request: Running, tokens: int = 1) -> None:
        """It has made tokens."""
        self.tenant(request).served += OUTPUT_WEIGHT * tokens

    def again(self) -> Running | None:
        """The first of those that have run before and can go on."""
        return next(self._may_go_on(), None)

    def _may_go_on(self) -> Iterator[Running]:
        return (request for request in self._again if not request.paused)

    def overdue(self) -> Running | None:
        """The oldest, if too many have passed it."""
        request = next(iter(self._new.values()), None)
        return request if request is not None and self._due[request.id] <= self._num_joined else None

    def candidates(self, skipped: set[int]) -> Iterator[Running]:
        """Who may join, in this order; the caller takes each (see `take`), or adds it to `skipped`, or stops."""
        while (request := self._next(skipped)) is not None:
            yield request

    def _next(self, skipped: set[int]) -> Running | None:
        if self.again() is not None:
            return next((request for request in self._may_go_on() if request.id not in skipped), None)
        if (request := self.overdue()) is not None and request.id not in skipped:
            return request
        for priority in sorted(self._classes):
            for tenant in sorted(self._classes[priority].values(), key=_turn):
                if (request := self._best(tenant, priority, skipped)) is not None:
                    return request
        return None

    def _best(self, tenant: Tenant, priority: int, skipped: set[int]) -> Running | None:
        first = islice(tenant.waiting[priority].values(), WINDOW)
        return max((r for r in first if r.id not in skipped), key=self._cached_length, default=None)

    def _lowest(self) -> float:
        """The counter of the waiting tenant that was served least."""
        waiting = [tenant.served for tenants in self._classes.values() for tenant in tenants.values()]
        return min(waiting, default=self._floor)

    def _forget_idle(self) -> None:
        if len(self._tenants) < MAX_IDLE_TENANTS:
            return
        idle = next((name for name, t in self._tenants.items() if not (t.waiting or t.num_running)), None)
        if idle is not None:
            del self._tenants[idle]


def _turn(tenant: Tenant) -> tuple[float, int]:
    """Fewest tokens first; at a tie who has fewest requests running."""
    return tenant.served, tenant.num_running
