"""Waiting requests that have not run on this engine: by owner, tenant of the owner, priority within the tenant, and
age."""

import bisect
import heapq
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

from text_generation_router.scheduling.request import Arrival
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.tenant import Account, Owner, Tenant


class Member(Protocol):
    """An owner or tenant that takes turns: the next turn goes to the member that was served the fewest tokens."""

    @property
    def account(self) -> Account: ...


M = TypeVar("M", bound=Member)

# When members leave, their entries stay in the heap until it has more than 2 × members + SPARE_ENTRIES entries.
SPARE_ENTRIES = 64


class FairTurns(Generic[M]):
    """Members by name, in order of their counters; of members with equal counters, the one with fewer running requests
    is first.

    Counters grow far more often than `first` is called. They never fall, so an outdated entry of the heap is at worst
    too near the top. `first` then moves it to its place.
    """

    def __init__(self) -> None:
        self._members: dict[str, M] = {}
        self._heap: list[tuple[float, int, int, str, M]] = []
        self._aside: list[tuple[str, M]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[M]:
        return iter(self._members.values())

    def get(self, name: str) -> M | None:
        return self._members.get(name)

    def add(self, name: str, member: M) -> None:
        self._members[name] = member
        heapq.heappush(self._heap, self._entry(name, member))
        if len(self._heap) > 2 * len(self._members) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._members.get(entry[-2]) is entry[-1]]
            heapq.heapify(self._heap)

    def remove(self, name: str) -> None:
        del self._members[name]

    def first(self) -> M | None:
        """The member whose turn it is, among members that are not set aside."""
        while self._heap:
            served, num_running, _, name, member = self._heap[0]
            if self._members.get(name) is not member:
                heapq.heappop(self._heap)
            elif (served, num_running) < (member.account.served, member.account.num_running):
                heapq.heapreplace(self._heap, self._entry(name, member))
            else:
                return member
        return None

    def set_aside(self) -> None:
        """Sets the first member aside until `restore` is called."""
        assert self.first() is not None
        self._aside.append(heapq.heappop(self._heap)[-2:])

    def restore(self) -> None:
        aside, self._aside = self._aside, []
        for name, member in aside:
            if self._members.get(name) is member:
                heapq.heappush(self._heap, self._entry(name, member))

    def _entry(self, name: str, member: M) -> tuple[float, int, int, str, M]:
        self._num_pushed += 1
        return member.account.served, member.account.num_running, self._num_pushed, name, member


# Within a tenant's first WINDOW requests, the request with the longest cached prefix goes first. A step tries at most
# WINDOW requests.
WINDOW = 32
# Number of other requests that may overtake a request or a priority before it goes next.
MAX_PASSED = 256

T = TypeVar("T")


class Priorities(Generic[T]):
    """Lines of requests, one for each priority: the lowest priority number goes first, but no line is overtaken more
    than MAX_PASSED times.
    """

    def __init__(self) -> None:
        self._things: dict[int, T] = {}
        # For each priority, the number of requests of better priorities that joined since its own last request joined.
        self._passed: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._things)

    def __iter__(self) -> Iterator[T]:
        return iter(self._things.values())

    def get(self, priority: int, make: Callable[[], T]) -> T:
        """The line of this priority, made by `make` if there is none yet."""
        if priority not in self._things:
            self._things[priority] = make()
        return self._things[priority]

    def __getitem__(self, priority: int) -> T:
        return self._things[priority]

    def remove(self, priority: int) -> None:
        del self._things[priority]
        self._passed.pop(priority, None)

    def first(self) -> T:
        return self._things[min(self._things)]

    def in_turn(self) -> list[T]:
        order = sorted(self._things, key=lambda priority: (self._passed.get(priority, 0) < MAX_PASSED, priority))
        return [self._things[priority] for priority in order]

    def note_joined(self, priority: int) -> None:
        """Notes that a request of `priority` joined: all worse priorities have been overtaken once more."""
        self._passed[priority] = 0
        for other in self._things:
            if other > priority:
                self._passed[other] = self._passed.get(other, 0) + 1


class Line:
    """The waiting requests of one tenant with one priority."""

    __slots__ = ("passed", "requests")

    def __init__(self) -> None:
        self.requests: list[Running] = []  # in order of arrival
        self.passed = 0  # number of requests of this line that joined since the first request became the first

    def add(self, request: Running) -> None:
        bisect.insort(self.requests, request, key=_arrival)

    def remove(self, request: Running) -> None:
        place = bisect.bisect_left(self.requests, request.arrival, key=_arrival)
        if not place:
            self.passed = 0
        del self.requests[place]

    def in_turn(
        self, cached_length: Callable[[Running], int], admits: Callable[[Running], bool], most: int
    ) -> list[Running]:
        """The first `most` requests that may join, longest cached prefix first. If MAX_PASSED others have overtaken the
        oldest request, it comes first, and occurs again at its place.
        """
        first = list(islice(filter(admits, self.requests), most))
        by_length = sorted(first, key=lambda request: (-cached_length(request), request.arrival))
        return [*first[:1], *by_length] if self.passed >= MAX_PASSED else by_length


class TenantLines:
    """The waiting requests of one tenant."""

    __slots__ = ("_begun", "_lines", "account")

    def __init__(self, account: Tenant) -> None:
        self.account = account
        self._begun: list[Running] = []  # requests that have run on another engine, by age and blame
        self._lines: Priorities[Line] = Priorities()

    def __bool__(self) -> bool:
        return bool(self._begun or self._lines)

    def add(self, request: Running) -> None:
        if request.past.has_run:
            bisect.insort(self._begun, request, key=lambda begun: begun.turn)
        else:
            self._lines.get(request.request.priority, Line).add(request)

    def remove(self, request: Running) -> None:
        if request.past.has_run:
            self._begun.remove(request)
            return
        priority = request.request.priority
        line = self._lines[priority]
        line.remove(request)
        if not line.requests:
            self._lines.remove(priority)

    def note_joined(self, request: Running) -> None:
        if not request.past.has_run:
            self._lines[request.request.priority].passed += 1
            self._lines.note_joined(request.request.priority)

    def first(self) -> Running:
        return self._begun[0] if self._begun else self._lines.first().requests[0]

    def in_turn(self, cached_length: Callable[[Running], int], admits: Callable[[Running], bool]) -> list[Running]:
        """The first requests that may join, in order: at most WINDOW + 1 entries. An overtaken request may occur
        twice."""
        order = list(islice(filter(admits, self._begun), WINDOW))
        for line in self._lines.in_turn():
            if len(order) >= WINDOW:
                break
            order += line.in_turn(cached_length, admits, WINDOW - len(order))
        return order


class OwnerLines:
    """The waiting requests of all tenants of one owner."""

    __slots__ = ("account", "tenants")

    def __init__(self, account: Owner) -> None:
        self.account = account
        self.tenants: FairTurns[TenantLines] = FairTurns()


class FairLines:
    """The waiting requests of one class. Owners take turns, and within an owner's turns its tenants take turns."""

    def __init__(self) -> None:
        self.owners: FairTurns[OwnerLines] = FairTurns()
        self._disturbed: list[OwnerLines] = []  # owners with tenants that `in_turn` has set aside

    def add(self, request: Running) -> None:
        share, tenant = request.request.share, request.tenant
        if (owner := self.owners.get(share.owner)) is None:
            owner = OwnerLines(tenant.owner)
            self.owners.add(share.owner, owner)
        if (lines := owner.tenants.get(share.tenant)) is None:
            lines = TenantLines(tenant)
            owner.tenants.add(share.tenant, lines)
        lines.add(request)

    def remove(self, request: Running) -> None:
        share = request.request.share
        owner, lines = self._lines_of(request)
        lines.remove(request)
        if not lines:
            owner.tenants.remove(share.tenant)
        if not owner.tenants:
            self.owners.remove(share.owner)

    def note_joined(self, request: Running) -> None:
        self._lines_of(request)[1].note_joined(request)

    def _lines_of(self, request: Running) -> tuple[OwnerLines, TenantLines]:
        share = request.request.share
        owner = self.owners.get(share.owner)
        lines = owner.tenants.get(share.tenant) if owner is not None else None
        assert owner is not None and lines is not None, "it does not wait"
        return owner, lines

    def in_turn(
        self,
        cached_length: Callable[[Running], int],
        admits: Callable[[Running], bool],
        is_settled: Callable[[Running], bool],
    ) -> Iterator[Running]:
        """Requests that may join, in order, without the settled ones. Each request that joins changes the turns, so the
        caller must settle a request before it asks for the next. Afterwards the caller must call `restore`.
        """
        orders: dict[Tenant, list[Running]] = {}
        while (owner := self.owners.first()) is not None:
            lines = owner.tenants.first()
            if lines is None:
                self.owners.set_aside()
                continue
            if lines.account not in orders:
                orders[lines.account] = lines.in_turn(cached_length, admits)[::-1]
            order = orders[lines.account]
            while order and is_settled(order[-1]):
                order.pop()
            if order:
                yield order[-1]
            else:
                owner.tenants.set_aside()
                self._disturbed.append(owner)

    def restore(self) -> None:
        """Lets the owners and tenants that `in_turn` set aside take turns again."""
        self.owners.restore()
        for owner in self._disturbed:
            owner.tenants.restore()
        self._disturbed = []

    def owed(self, most: int) -> Running | None:
        """The first waiting request of an owner to which the owner with `most` running requests owes a place. Of
        several such owners, the owner with the fewest running requests counts, then the owner with the fewest served
        tokens. If there is no such owner: the first request of a tenant without running requests, whose owner has
        another tenant with several.
        """
        owners = [owner for owner in self.owners if owner.account.is_owed_by(most)]
        if owners:
            least_first = lambda owner: (owner.account.num_running, owner.account.served)  # noqa: E731
            lines = min(owners, key=least_first).tenants.first()
            return lines.first() if lines is not None else None
        crowded = (lines for owner in self.owners for lines in owner.tenants if lines.account.is_crowded_out)
        least = min(crowded, key=lambda lines: lines.account.served, default=None)
        return least.first() if least is not None else None


def _arrival(request: Running) -> Arrival:
    return request.arrival
