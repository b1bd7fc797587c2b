"""New Work streams: how many an engine takes at a time, and how fast, whatever fronts do."""

import asyncio
from collections import Counter

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_common.tests.examples import examples
from text_generation_router.engine.tests.fakes import expected_tokens, prompt
from text_generation_router.engine_service import arrivals, servicer
from text_generation_router.engine_service.arrivals import (
    ADDRESS_AT_ONCE,
    ADDRESS_PER_SECOND,
    AT_ONCE,
    FRONT_AT_ONCE,
    FRONT_PER_SECOND,
    MAX_AT_ADDRESS,
    MAX_FRONTS,
    MAX_NAMES,
    PER_SECOND,
    Arrivals,
    ArrivingFront,
    arriving_front,
)
from text_generation_router.engine_service.tests.raw_front import EngineWorld, RawFront, hello, serve, submit

SECONDS = 60


def come_and_go(arrivals: Arrivals, caller: ArrivingFront, now_s: float) -> bool:
    """A front connects, and its connection ends at once. Returns whether it was let in."""
    if arrivals.refusal(caller, now_s):
        return False
    arrivals.leave(caller)
    return True


def test_a_front_that_connects_all_the_time_is_let_in_at_its_pace_and_others_at_once() -> None:
    arrivals = Arrivals(0.0)
    bad, good = ArrivingFront("bad", "10.0.0.1"), ArrivingFront("good", "10.0.0.1")
    taken = [come_and_go(arrivals, bad, tick / 100) for tick in range(100 * SECONDS)]
    assert sum(taken) in range(FRONT_AT_ONCE, FRONT_AT_ONCE + round(FRONT_PER_SECOND * SECONDS) + 1)
    assert come_and_go(arrivals, good, SECONDS)


@pytest.mark.parametrize("address", ["", "10.0.0.1"])
def test_invented_fronts_are_let_in_at_one_pace_and_hardly_remembered(address: str) -> None:
    arrivals = Arrivals(0.0)
    taken = sum(come_and_go(arrivals, ArrivingFront(str(tick), address), tick / 100) for tick in range(100 * SECONDS))
    at_once, per_second = (ADDRESS_AT_ONCE, ADDRESS_PER_SECOND) if address else (AT_ONCE, PER_SECOND)
    assert taken in range(at_once, at_once + per_second * SECONDS + 1)
    assert arrivals.num_names <= 2 * MAX_NAMES
    assert come_and_go(arrivals, ArrivingFront("good", "10.0.0.2"), SECONDS) or not address


def test_invented_fronts_of_one_machine_leave_places_for_other_machines() -> None:
    arrivals = Arrivals(0.0)
    found = Counter(
        arrivals.refusal(ArrivingFront(str(number), "10.0.0.1"), float(number)) for number in range(MAX_FRONTS)
    )
    assert found[""] == MAX_AT_ADDRESS
    assert not any(
        arrivals.refusal(ArrivingFront(f"good {number}", f"10.0.1.{number}"), 500.0) for number in range(100)
    )


def test_all_fronts_of_an_engine_that_starts_again_come_at_once_and_a_restart_of_all_fronts_is_not_hindered() -> None:
    arrivals = Arrivals(0.0)
    fronts = [ArrivingFront(f"{place}", f"10.0.0.{place % 4}") for place in range(MAX_FRONTS)]
    for now_s in (1.0, 3.0):  # the second time, their connections have been lost
        assert not any(arrivals.refusal(front, now_s) for front in fronts)
        for front in fronts:
            arrivals.leave(front)
    few = [ArrivingFront(f"new {place}", "") for place in range(MAX_FRONTS)]
    assert not any(not come_and_go(arrivals, front, 4.0 + place) for place, front in enumerate(few))


@examples(60)
@given(st.data())
def test_streams_never_exceed_their_number_and_places_come_back(data: st.DataObject) -> None:
    arrivals, now_s, inside = Arrivals(0.0), 0.0, list[ArrivingFront]()
    callers = st.builds(ArrivingFront, st.sampled_from("abcdefgh"), st.sampled_from(["", "10.0.0.1", "10.0.0.2"]))
    for caller, wait_s in data.draw(st.lists(st.tuples(callers, st.sampled_from([0.0, 0.5, 30.0])), max_size=40)):
        now_s += wait_s
        if not arrivals.refusal(caller, now_s):
            inside.append(caller)
        if wait_s and inside:
            arrivals.leave(inside.pop(0))
        assert arrivals._open.total() == len(inside)
    for caller in inside:
        arrivals.leave(caller)
    assert not arrivals._open


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.3:51234", "10.0.0.3"),
        ("ipv6:%5Bfd00::3%5D:51234", "%5Bfd00::3%5D"),
        ("unix:", ""),
        ("unix:/run/a:b", ""),
    ],
)
def test_a_caller_is_known_by_its_address_without_the_port(peer: str, address: str) -> None:
    assert arriving_front("a", peer) == ArrivingFront("a", address)


def test_a_front_that_comes_too_often_is_told_to_come_later_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrivals, "FRONT_AT_ONCE", 2)
    monkeypatch.setattr(arrivals, "FRONT_PER_SECOND", 0.001)
    monkeypatch.setattr(servicer, "REFUSED_AFTER_S", 0.01)
    monkeypatch.setattr(servicer, "MAX_REFUSED", 1)

    async def use(world: EngineWorld) -> None:
        for _ in range(2):
            (await world.front("bad")).call.cancel()
        turned_away = [RawFront(world.stub) for _ in range(3)]
        for front in turned_away:
            await front.send(hello("bad"))
        assert {await front.code() for front in turned_away} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert "try again" in await turned_away[0].call.details()
        assert world.metric("tgi_engine_turned_away_total") == 3
        good = await world.front("good")
        await good.send(submit([1], prompt(1), 6))
        await good.until_ended(1)
        assert good.ids[1] == expected_tokens(prompt(1), 6)

    serve(use)


def test_a_refusal_waits_so_that_calls_without_end_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "FRONT_AT_ONCE", 0)
    monkeypatch.setattr(servicer, "REFUSED_AFTER_S", 3600.0)

    async def use(world: EngineWorld) -> None:
        held = [RawFront(world.stub) for _ in range(2)]
        await held[0].send(hello("bad"))
        await held[1].send(submit([1], prompt(0), 3))  # not a Hello
        while world.server._servicer._num_refused < 2:
            await asyncio.sleep(0.005)
        for front in held:
            front.call.cancel()
        while world.server._servicer._num_refused:
            await asyncio.sleep(0.005)

    serve(use)
