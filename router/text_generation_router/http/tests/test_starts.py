import asyncio

from text_generation_router.http.gate import Starts


async def begin_all(owners: str, *cancelled: int) -> list[str]:
    """The order of starts of simultaneous requests, one request per letter of `owners`: the owner's letter for each
    start, "." for each turn of the event loop."""
    starts, seen, left = Starts(), [], len(owners) - len(cancelled)

    async def request(owner: str) -> None:
        nonlocal left
        await starts.turn_of(owner)
        seen.append(owner)
        left -= 1

    def turn() -> None:
        seen.append(".")
        if left:
            asyncio.get_running_loop().call_soon(turn)

    tasks = [asyncio.create_task(request(owner)) for owner in owners]
    await asyncio.sleep(0)
    turn()
    for number in cancelled:
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seen


def test_no_turn_of_the_event_loop_has_two_starts():
    seen = "".join(asyncio.run(begin_all("aaaaabb")))
    assert sorted(seen.replace(".", "")) == list("aaaaabb")
    assert all(len(starts) <= 1 for starts in seen.split("."))


def test_owners_begin_in_turn():
    seen = "".join(asyncio.run(begin_all("aaaaaabbc")))
    assert seen.replace(".", "") == "aabcabaaa"


def test_requests_that_are_cancelled_take_no_start_from_others():
    seen = "".join(asyncio.run(begin_all("aaaabb", 1, 2, 4)))
    assert seen.replace(".", "") == "aba"
