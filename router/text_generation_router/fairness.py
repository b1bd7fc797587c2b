"""Equal shares of owners and their tenants: of slots (threads, child processes, places), and of the turns of the event
loop. Imports `Share` of `scheduling/` and errors.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from text_generation_router.errors import OverloadedError
from text_generation_router.scheduling.request import Share

T = TypeVar("T")


class FairThreads:
    """A thread pool for work that releases the interpreter lock. Its threads are shared equally between owners, and
    between an owner's tenants."""

    def __init__(self, threads: int, max_waiting: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._slots = FairSlots(threads, max_waiting)

    async def run(self, share: Share, cost: float, work: Callable[[], T]) -> T:
        """Runs `work` in a thread and returns its result. Raises OverloadedError if too many calls of the tenant wait,
        or if no thread was free within WAIT_S seconds.
        """
        await self._slots.acquire(share, cost)
        loop = asyncio.get_running_loop()
        try:
            job = self._executor.submit(work)
        except BaseException:
            self._slots.release(share)
            raise

        def free_slot(_: object) -> None:
            with suppress(RuntimeError):  # the event loop is closed, so no call waits any more
                loop.call_soon_threadsafe(self._slots.release, share)

        # The slot is freed when the work ends, not when the caller does: a cancelled caller leaves its thread working.
        job.add_done_callback(free_slot)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


# Number of idle owners whose counters are kept, and of idle tenants for each owner.
MAX_IDLE = 256
# Seconds that `acquire` waits for a slot, by default.
WAIT_S = 60.0


class ShareNode:
    """A node of the tree root - owner - tenant. A node's children get equal shares: the child with the least total cost
    of work goes next. An idle child saves up nothing: when it waits again, its counter is at least `floor`.
    """

    __slots__ = ("children", "floor", "num_held", "num_waiting", "places", "served")

    def __init__(self) -> None:
        self.served = 0.0  # total cost of the work that this node got slots for
        self.floor = 0.0  # `served` of the child that last got a slot, before it got that slot
        self.num_waiting = 0
        self.num_held = 0
        self.children: dict[str, ShareNode] = {}
        # A tenant's waiting calls, oldest first: the cost of the work, and a future that is done once it has a slot.
        self.places: deque[tuple[float, asyncio.Future[None]]] = deque()

    @property
    def is_idle(self) -> bool:
        return not (self.num_waiting or self.num_held)

    def child(self, name: str) -> "ShareNode":
        if name not in self.children:
            self._forget_idle()
            self.children[name] = ShareNode()
        return self.children[name]

    def enter(self, child: "ShareNode") -> None:
        if not child.num_waiting:
            child.served = max(child.served, self.floor)
        child.num_waiting += 1

    def next(self, max_held: int) -> "ShareNode | None":
        """The child with the least `served`, among children that wait and hold fewer than `max_held` slots."""
        waiting = (child for child in self.children.values() if child.num_waiting and child.num_held < max_held)
        return min(waiting, key=lambda child: child.served, default=None)

    def serve(self, child: "ShareNode", cost: float) -> None:
        self.floor = child.served
        child.served += cost
        child.num_held += 1

    def _forget_idle(self) -> None:
        idle = [name for name, child in self.children.items() if child.is_idle]
        if len(idle) >= MAX_IDLE:
            for name in idle:
                del self.children[name]


class FairSlots:
    """A number of slots that are shared equally between owners, and each owner's part between its tenants. For use in
    one event loop.
    """

    def __init__(self, slots: int, max_waiting: int, max_held: int | None = None, wait_s: float = WAIT_S) -> None:
        """`max_waiting`: most calls of one tenant that may wait. `max_held`: most slots that one owner may hold, so
        that an owner with long work leaves a slot for other owners; None: no limit.
        """
        self._free = slots
        self._max_waiting = max_waiting
        self._max_held = slots if max_held is None else max_held
        self._wait_s = wait_s
        self._all = ShareNode()

    @property
    def num_owners(self) -> int:
        """Number of owners that hold a slot or wait for one."""
        return sum(not owner.is_idle for owner in self._all.children.values())

    @asynccontextmanager
    async def slot(self, share: Share, cost: float) -> AsyncGenerator[None, None]:
        """Holds a slot inside the context. Raises what `acquire` raises."""
        await self.acquire(share, cost)
        try:
            yield
        finally:
            self.release(share)

    async def acquire(self, share: Share, cost: float) -> None:
        """Waits for a slot; the caller must `release` it. Raises OverloadedError if too many calls of the tenant wait,
        or after `wait_s` seconds. A cancelled call holds no slot."""
        owner = self._all.child(share.owner)
        tenant = owner.child(share.tenant)
        if len(tenant.places) >= self._max_waiting:
            raise OverloadedError
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._all.num_waiting += 1
        self._all.enter(owner)
        owner.enter(tenant)
        tenant.places.append((cost, granted))
        self._hand_out()
        if not granted.done():
            await self._wait(granted, share)

    async def _wait(self, granted: asyncio.Future[None], share: Share) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                try:
                    await granted
                except asyncio.CancelledError:  # by the caller, or by the timeout
                    if not granted.cancel() and not granted.cancelled():
                        self.release(share)  # the slot was granted just before
                    raise
        except TimeoutError as error:
            raise OverloadedError from error

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
            cost, granted = tenant.places.popleft()
            for node in (self._all, owner, tenant):
                node.num_waiting -= 1
            if granted.done():  # the caller was cancelled
                continue
            self._free -= 1
            self._all.serve(owner, cost)
            owner.serve(tenant, cost)
            granted.set_result(None)


# Does at most a few things in each turn of the event loop, owners in turn.
#
# Between two turns the loop does its other work, so that a burst of one kind of work (requests that begin, readers that
# get tokens) delays neither other work nor other owners for long.

# Does one thing. Returns False if there was nothing to do any more; another thing is then done in its place.
Action = Callable[[], bool]


class LoopTurns:
    def __init__(self, per_turn: int) -> None:
        """`per_turn`: most things in one turn of the event loop."""
        self._per_turn = per_turn
        self._num_done = 0  # things done since `_begin_turn`, at most `per_turn`
        self._lines: OrderedDict[str, deque[Action]] = OrderedDict()  # waiting things by owner; the first owner is next

    def put(self, owner: str, action: Action) -> None:
        """Calls `action` at once if fewer than `per_turn` things were done in this turn, else in a later turn."""
        if self._num_done >= self._per_turn:
            if (line := self._lines.get(owner)) is None:
                line = self._lines[owner] = deque()
            line.append(action)
        elif action():
            self._count()

    def _count(self) -> None:
        """Counts a thing that was done. Few things in each turn need no callback of the loop."""
        self._num_done += 1
        if self._num_done == self._per_turn:
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        """Called in the turn after `per_turn` things were done, in one turn or in several."""
        self._num_done = 0
        while self._lines and self._num_done < self._per_turn:
            owner, line = self._lines.popitem(last=False)
            action = line.popleft()
            if line:
                self._lines[owner] = line
            if action():
                self._count()
