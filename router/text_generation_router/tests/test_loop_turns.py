import asyncio
from collections.abc import Callable

from text_generation_router.fairness import LoopTurns


def done_of(per_turn: int, things: str, has_work: Callable[[int], bool] = lambda place: True) -> str:
    """What is done of `things`, one letter per owner, put in all at once: the letters, and "." for each turn of the
    event loop. `has_work`: whether the thing at a place has anything to do."""

    async def run() -> str:
        turns, seen = LoopTurns(per_turn), []
        loop = asyncio.get_running_loop()

        def action(place: int) -> Callable[[], bool]:
            def act() -> bool:
                if has_work(place):
                    seen.append(things[place])
                return has_work(place)

            return act

        def tick() -> None:
            seen.append(".")
            loop.call_soon(tick)

        loop.call_soon(tick)
        for place, owner in enumerate(things):
            turns.put(owner, action(place))
        for _ in things:
            await asyncio.sleep(0)
        return "".join(seen)

    return asyncio.run(run()).rstrip(".")


def test_each_turn_does_a_few_things():
    assert done_of(3, "aaaaaaaa") == "aaa.aaa.aa"
    assert done_of(3, "aa") == "aa"


def test_owners_take_turns():
    assert done_of(2, "aaaaaaaabb") == "aa.ab.ab.aa.aa"


def test_a_thing_without_work_takes_no_place():
    assert done_of(2, "aabbcc", lambda place: place not in (0, 3)) == "ab.cc"
