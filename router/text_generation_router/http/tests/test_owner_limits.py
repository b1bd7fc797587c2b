import asyncio

import pytest

from text_generation_router.errors import OverloadedError
from text_generation_router.http.room import OwnerLimits


async def test_each_owner_has_its_own_number_of_places():
    places, inside = OwnerLimits(2, wait_s=60), []
    leave = asyncio.Event()

    async def enter(owner: str) -> None:
        async with places.one_of(owner):
            inside.append(owner)
            await leave.wait()

    tasks = [asyncio.create_task(enter(owner)) for owner in "aaaabbb"]
    await asyncio.sleep(0.01)
    seen = sorted(inside)
    leave.set()
    await asyncio.gather(*tasks)
    assert sorted(inside) == list("aaaabbb") and places.owners == 0
    assert seen == list("aabb")


async def test_the_wait_for_a_place_ends_with_an_error():
    places = OwnerLimits(1, wait_s=0.01)
    async with places.one_of("a"):
        with pytest.raises(OverloadedError):
            async with places.one_of("a"):
                raise AssertionError("two have one place")
    assert places.owners == 0


async def test_cancelled_waits_leave_nothing_behind():
    places = OwnerLimits(1, wait_s=60)

    async def enter() -> None:
        async with places.one_of("a"):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(enter()) for _ in range(3)]
    await asyncio.sleep(0)
    for task in reversed(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert places.owners == 0
