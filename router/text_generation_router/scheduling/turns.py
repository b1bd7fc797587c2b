"""Members (owners or tenants) take turns: the next turn goes to the member that was served the fewest tokens."""

import heapq
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from text_generation_router.scheduling.tenant import Account


class Member(Protocol):
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
