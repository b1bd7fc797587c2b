"""Something scarce that is held for a short while, such as a thread: which share gets it next."""

import asyncio
from collections import deque

from text_generation_router.errors import OverloadedError
from text_generation_router.scheduling.share import Share

# Owners that wait for nothing, and as many tenants of one owner, whose counters are remembered.
MAX_IDLE = 256


class Place:
    """In the line of one tenant, for a slot that will be used for work of the given cost."""

    __slots__ = ("cost", "granted")

    def __init__(self, cost: float, granted: asyncio.Future[None]) -> None:
        self.cost = cost
        self.granted = granted


class Node:
    """All owners together, or an owner, or a tenant. Its children are served in equal shares: next is the child that
    has been served least. A child saves nothing up while it waits for nothing: it begins again at `floor`."""

    __slots__ = ("children", "floor", "num_waiting", "places", "served")

    def __init__(self) -> None:
        self.served = 0.0  # the cost of what it was given
        self.floor = 0.0  # what the child served last had been given before
        self.num_waiting = 0
        self.children: dict[str, Node] = {}
        self.places: deque[Place] = deque()  # of a tenant, in order

    def child(self, name: str) -> "Node":
        if name not in self.children:
            self._forget_idle()
            self.children[name] = Node()
        return self.children[name]

    def enter(self, child: "Node") -> None:
        if not child.num_waiting:
            child.served = max(child.served, self.floor)
        child.num_waiting += 1

    def next(self) -> "Node":
        return min((child for child in self.children.values() if child.num_waiting), key=lambda child: child.served)

    def charge(self, child: "Node", cost: float) -> None:
        self.floor = child.served
        child.served += cost

    def _forget_idle(self) -> None:
        idle = [name for name, child in self.children.items() if not child.num_waiting]
        if len(idle) >= MAX_IDLE:
            for name in idle:
                del self.children[name]


class FairSlots:
    """`slots` of something, shared first between owners, then between an owner's tenants. For one event loop."""

    def __init__(self, slots: int, max_waiting: int) -> None:
        """`max_waiting`: how many of one tenant may wait."""
        self._free = slots
        self._max_waiting = max_waiting
        self._all = Node()

    async def acquire(self, share: Share, cost: float) -> None:
        """Waits for a slot; whoever gets it calls `release`. Raises OverloadedError if the tenant has too many waiting.
        A caller that is cancelled has none."""
        owner = self._all.child(share.owner)
        tenant = owner.child(share.tenant)
        if len(tenant.places) >= self._max_waiting:
            raise OverloadedError
        place = Place(cost, asyncio.get_running_loop().create_future())
        self._all.num_waiting += 1
        self._all.enter(owner)
        owner.enter(tenant)
        tenant.places.append(place)
        self._hand_out()
        if place.granted.done():
            return
        try:
            await place.granted
        except asyncio.CancelledError:
            if not place.granted.cancelled():
                self.release()
            raise

    def release(self) -> None:
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free and self._all.num_waiting:
            owner = self._all.next()
            tenant = owner.next()
            place = tenant.places.popleft()
            for node in (self._all, owner, tenant):
                node.num_waiting -= 1
            if place.granted.done():  # its caller was cancelled
                continue
            self._all.charge(owner, place.cost)
            owner.charge(tenant, place.cost)
            self._free -= 1
            place.granted.set_result(None)
