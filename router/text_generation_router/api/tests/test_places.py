import asyncio
import json

import pytest

from text_generation_router.api.body import LARGE_BYTES, OWNERS_BODIES
from text_generation_router.errors import OverloadedError
from text_generation_router.http.places import Places


def test_each_owner_has_its_own_number_of_places():
    async def run() -> list[str]:
        places, inside = Places(2, wait_s=60), []
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
        return seen

    assert asyncio.run(run()) == list("aabb")


def test_the_wait_for_a_place_ends_with_an_error():
    async def run() -> None:
        places = Places(1, wait_s=0.01)
        async with places.one_of("a"):
            with pytest.raises(OverloadedError):
                async with places.one_of("a"):
                    raise AssertionError("two have one place")
        assert places.owners == 0

    asyncio.run(run())


def test_cancelled_waits_leave_nothing_behind():
    async def run() -> None:
        places = Places(1, wait_s=60)

        async def enter() -> None:
            async with places.one_of("a"):
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(enter()) for _ in range(3)]
        await asyncio.sleep(0)
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert places.owners == 0

    asyncio.run(run())


def test_the_number_of_one_owners_large_bodies_in_memory_is_bounded(make_server):
    """Further bodies of the owner are received only until the server sees that they are large."""
    server = make_server(payload_limit=10**6)
    piece = b"x" * (LARGE_BYTES // 2)
    taken: list[int] = []

    async def drip(number: int) -> None:
        async def receive():
            taken[number] += 1
            if taken[number] > 4:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": piece, "more_body": True}

        async def send(message):
            raise AssertionError("an answer to a body that has not ended")

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers, "query_string": b""}
        await server.app(scope | {"client": ("192.0.2.1", 1)}, receive, send)

    async def run() -> tuple[int, int]:
        taken.extend([0] * (OWNERS_BODIES + 5))
        tasks = [asyncio.create_task(drip(number)) for number in range(OWNERS_BODIES + 5)]
        await asyncio.sleep(0.1)
        large = json.dumps({"inputs": "Hi", "padding": "x" * LARGE_BYTES}).encode()
        small = (await server.call("POST", "/generate", b'{"inputs": "Hi"}')).status
        other = (await server.call("POST", "/generate", large, client="192.0.2.2")).status
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return small, other

    assert asyncio.run(run()) == (200, 200)
    assert sorted(taken) == [3] * 5 + [5] * OWNERS_BODIES
