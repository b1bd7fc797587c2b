"""Something scarce that is held for a short while, such as a thread: which share gets it next."""

import asyncio
from collections import deque

from text_generation_router.errors import OverloadedError
from text_generation_router.scheduling.share import Share

# Owners that wait for nothing, and as many tenants of one owner, whose counters are remembered.
MAX_IDLE = 256
# How long a place in the line is kept.
WAIT_S = 60.0


class PlaceInLine:
    """In the line of one tenant, for a slot that will be used for work of the given cost."""

    __slots__ = ("cost", "granted")

    def __init__(self, cost: float, granted: asyncio.Future[None]) -> None:
        self.cost = cost
        self.granted = granted


class ShareNode:
    """All owners together, or an owner, or a tenant. Its children are served in equal shares: next is the child that
    has been served least. A child saves nothing up while it waits for nothing: it begins again at `floor`."""

    __slots__ = ("children", "floor", "num_held", "num_waiting", "places", "served")

    def __init__(self) -> None:
        self.served = 0.0  # the cost of what it was given
        self.floor = 0.0  # what the child served last had been given before
        self.num_waiting = 0
        self.num_held = 0
        self.children: dict[str, ShareNode] = {}
        self.places: deque[PlaceInLine] = deque()  # of a tenant, in order

    def child(self, name: str) -> "ShareNode":
        if name not in self.children:
            self._forget_idle()
            self.children[name] = ShareNode()
        return self.children[name]

    def enter(self, child: "ShareNode") -> None:
        if not child.num_waiting:
            child.served = max(child.served, self.floor)
        child.num_waiting += 1

    def next(self, most_held: int) -> "ShareNode | None":
        """Of the children that wait and hold less than `most_held`."""
        waiting = (child for child in self.children.values() if child.num_waiting and child.num_held < most_held)
        return min(waiting, key=lambda child: child.served, default=None)

    def serve(self, child: "ShareNode", cost: float) -> None:
        self.floor = child.served
        child.served += cost
        child.num_held += 1

    def _forget_idle(self) -> None:
        idle = [name for name, child in self.children.items() if not (child.num_waiting or child.num_held)]
        if len(idle) >= MAX_IDLE:
            for name in idle:
                del self.children[name]


class FairSlots:
    """`slots` of something, shared first between owners, then between an owner's tenants. For one event loop."""

    def __init__(self, slots: int, max_waiting: int, max_held: int | None = None, wait_s: float = WAIT_S) -> None:
        """`max_waiting`: how many of one tenant may wait. `max_held`: how many slots one owner may have, where work may
        take long and a slot is to be there for others."""
        self._free = slots
        self._max_waiting = max_waiting
        self._max_held = slots if max_held is None else max_held
        self._wait_s = wait_s
        self._all = ShareNode()

    async def acquire(self, share: Share, cost: float) -> None:
        """Waits for a slot; whoever gets it calls `release`. Raises OverloadedError if the tenant has too many waiting,
        or after `wait_s`. A caller that is cancelled has none."""
        owner = self._all.child(share.owner)
        tenant = owner.child(share.tenant)
        if len(tenant.places) >= self._max_waiting:
            raise OverloadedError
        place = PlaceInLine(cost, asyncio.get_running_loop().create_future())
        self._all.num_waiting += 1
        self._all.enter(owner)
        owner.enter(tenant)
        tenant.places.append(place)
        self._hand_out()
        if not place.granted.done():
            await self._wait(place, share)

    async def _wait(self, place: PlaceInLine, share: Share) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await place.granted
        except TimeoutError as error:
            self._give_up(place, share)
            raise OverloadedError from error
        except asyncio.CancelledError:
            self._give_up(place, share)
            raise

    def _give_up(self, place: PlaceInLine, share: Share) -> None:
        if not place.granted.cancel() and not place.granted.cancelled():
            self.release(share)  # it was granted at the same moment

    def release(self, share: Share) -> None:
        self._free += 1
        owner = self._all.children[share.owner]
        owner.num_held -= 1
        owner.children[share.tenant].num_held -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free and (owner := self._all.next(self._max_held)):
            tenant = owner.next(self._max_held)
            assert tenant is not None
            place = tenant.places.popleft()
            for node in (self._all, owner, tenant):
                node.num_waiting -= 1
            if place.granted.done():  # its caller was cancelled
                continue
            self._free -= 1
            self._all.serve(owner, place.cost)
            owner.serve(tenant, place.cost)
            place.granted.set_result(None)
