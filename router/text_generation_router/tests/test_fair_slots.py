import asyncio
from collections import Counter

import pytest

from text_generation_router.errors import OverloadedError
from text_generation_router.fairness import MAX_IDLE, FairSlots, FairThreads
from text_generation_router.scheduling.request import Share


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Users:
    """Users of one slot. `order` records the shares that got the slot, in order."""

    def __init__(self, max_waiting: int = 1000) -> None:
        self.slots = FairSlots(1, max_waiting)
        self.order: list[Share] = []
        self.tasks: list[asyncio.Task[None]] = []

    def want(self, share: Share, cost: float = 1, times: int = 1) -> None:
        self.tasks += [asyncio.create_task(self._use(share, cost)) for _ in range(times)]

    async def _use(self, share: Share, cost: float) -> None:
        await self.slots.acquire(share, cost)
        try:
            self.order.append(share)
            await asyncio.sleep(0)
        finally:
            self.slots.release(share)

    async def all_done(self) -> None:
        await asyncio.gather(*self.tasks)


A, B = Share("a"), Share("b")


async def test_owners_take_turns_whatever_one_of_them_has_waiting():
    users = Users()
    users.want(A, times=50)
    await settle()
    users.want(B, times=5)
    await users.all_done()
    after = users.order[users.order.index(B) :]
    assert Counter(after[:10]) == {A: 5, B: 5}
    assert users.order.index(B) < 10


async def test_shares_are_equal_by_cost_not_by_number_of_calls():
    users = Users()
    users.want(A, cost=10, times=20)
    users.want(B, cost=1, times=20)
    await users.all_done()
    assert Counter(users.order[:22]) == {A: 2, B: 20} or Counter(users.order[:23]) == {A: 3, B: 20}


async def test_the_tenants_of_an_owner_share_its_share():
    users = Users()
    many = [Share("a", f"tenant {i}") for i in range(10)]
    for share in many:
        users.want(share, times=10)
    users.want(B, times=50)
    await users.all_done()
    first = Counter(users.order[:100])
    assert 49 <= first[B] <= 50
    assert all(4 <= first[share] <= 6 for share in many)


async def test_idle_time_earns_no_credit_and_owners_share_by_cost():
    """Owner A has many waiting calls of cost 1. Owner B makes its next call, of cost 4, each time it was served."""
    users = Users()
    users.want(A, times=100)
    await users.all_done()
    users.order.clear()
    users.want(A, cost=1, times=20)
    for _ in range(10):
        users.want(B, cost=4)
        await users.tasks[-1]
    assert users.order.count(A) == 20
    await users.all_done()
    assert users.order.index(B) <= 1
    assert users.order[:21].count(B) in (4, 5, 6)


async def test_a_tenant_has_a_bounded_line_and_the_others_room():
    users = Users(max_waiting=3)
    await users.slots.acquire(A, 1)
    users.want(A, times=3)
    await settle()
    with pytest.raises(OverloadedError):
        await users.slots.acquire(A, 1)
    users.want(B)
    await settle()
    users.slots.release(A)
    await users.all_done()
    assert Counter(users.order) == {A: 3, B: 1}


async def test_a_caller_that_is_cancelled_leaves_no_slot_taken():
    users = Users()
    await users.slots.acquire(A, 1)
    users.want(A, times=2)
    users.want(B)
    await settle()
    users.tasks[0].cancel()  # cancelled while it waits
    users.slots.release(A)  # grants the slot to a task that has not yet run again
    for task in users.tasks:
        task.cancel()
    await asyncio.gather(*users.tasks, return_exceptions=True)
    async with asyncio.timeout(60):
        await users.slots.acquire(A, 1)


async def test_one_owner_does_not_hold_all_slots():
    slots = FairSlots(3, 10, max_held=2)
    tenants = [Share("a", str(number)) for number in range(3)]
    for share in tenants[:2]:
        await slots.acquire(share, 1)
    third = asyncio.create_task(slots.acquire(tenants[2], 1))
    await settle()
    assert not third.done()
    await slots.acquire(B, 1)
    slots.release(tenants[0])
    await third


async def test_a_call_is_refused_after_its_waiting_time():
    slots = FairSlots(1, 10, wait_s=0.01)
    await slots.acquire(A, 1)
    with pytest.raises(OverloadedError):
        await slots.acquire(B, 1)
    slots.release(A)
    await slots.acquire(B, 1)


async def test_idle_owners_are_forgotten():
    slots = FairSlots(1, 1)
    for number in range(3 * MAX_IDLE):
        share = Share(str(number), str(number))
        await slots.acquire(share, 1)
        slots.release(share)
    assert len(slots._all.children) <= MAX_IDLE


async def test_a_thread_counts_as_busy_until_its_work_is_done():
    threads = FairThreads(1, 10, "test")
    gate, entered = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def block():
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

    blocked = asyncio.create_task(threads.run(A, 1, block))
    await entered.wait()
    blocked.cancel()
    await asyncio.gather(blocked, return_exceptions=True)
    waiting = asyncio.create_task(threads.run(B, 1, lambda: "done"))
    await settle()
    assert not threads._slots._free and not waiting.done()
    gate.set()
    async with asyncio.timeout(60):
        assert await waiting == "done"
    threads.close()


async def test_what_the_work_raises_is_raised():
    threads = FairThreads(1, 10, "test")
    with pytest.raises(ZeroDivisionError):
        await threads.run(A, 1, lambda: 1 // 0)
    assert await threads.run(A, 1, lambda: 2) == 2
    threads.close()
