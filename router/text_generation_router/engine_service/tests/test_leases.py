"""Shares of permits, useless messages, and what waits to be sent to a front."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine_service.fronts import leases
from text_generation_router.engine_service.sinks import Outbox
from text_generation_router.engine_service.work import AT_ONCE, PER_SECOND, Allowance
from text_generation_router.errors import FrontLostError


@given(st.integers(0, 300), st.dictionaries(st.text(max_size=3), st.integers(0, 90), min_size=1, max_size=8))
def test_each_front_may_have_all_that_the_others_do_not_use(permits: int, used: dict[str, int]) -> None:
    shared = leases(permits, used)
    for front, lease in shared.items():
        others = sum(count for name, count in used.items() if name != front)
        assert lease == max(0, permits - others)


def test_one_front_may_have_the_whole_load() -> None:
    assert leases(8, {"a": 0, "b": 0}) == {"a": 8, "b": 8}
    assert leases(8, {"a": 8, "b": 0}) == {"a": 8, "b": 0}


def test_without_fronts_nothing_is_leased() -> None:
    assert leases(9, {}) == {}


def test_an_allowance_fills_up_again() -> None:
    allowance = Allowance(0.0)
    assert all(allowance.take(0.0) for _ in range(AT_ONCE)) and not allowance.take(0.0)
    assert sum(allowance.take(2.0) for _ in range(AT_ONCE)) in range(2 * PER_SECOND - 2, 2 * PER_SECOND + 1)


async def _write_never(message: pb.EngineMessage) -> None:
    await asyncio.Event().wait()


def _message(size: int) -> pb.EngineMessage:
    return pb.EngineMessage(epoch=pb.Epoch(reason="x" * size))


async def test_a_message_that_is_not_read_in_time_loses_the_front() -> None:
    outbox = Outbox(stall_s=0.01)
    outbox.put(_message(9))
    with pytest.raises(FrontLostError, match=r"0\.01 s"):
        await outbox.run(_write_never)


async def test_too_many_bytes_that_wait_lose_the_front_and_are_let_go() -> None:
    outbox = Outbox(max_bytes=1000)
    for _ in range(20):
        outbox.put(_message(100))
    assert not outbox._messages
    with pytest.raises(FrontLostError, match="1000 bytes"):
        await outbox.run(_write_never)


async def test_bytes_that_were_read_no_longer_count() -> None:
    sent: list[pb.EngineMessage] = []

    async def write(message: pb.EngineMessage) -> None:
        sent.append(message)

    outbox = Outbox(max_bytes=1000)
    sending = asyncio.create_task(outbox.run(write))
    for number in range(50):
        outbox.put(_message(100 + number))
        await asyncio.sleep(0)
    assert [len(message.epoch.reason) for message in sent] == list(range(100, 150))
    sending.cancel()
