"""Messages that no front of ours sends: each is done, refused or ends the stream, and the engine goes on."""

import asyncio
import math
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from random import Random

import grpc
import pytest

from text_generation_common.tasks import cancelled
from text_generation_proto import engine_pb2 as pb
from text_generation_proto import engine_pb2_grpc as pb_grpc
from text_generation_router.engine.tests.fakes import INFO, expected_tokens, prompt
from text_generation_router.engine_service import arrivals, servicer
from text_generation_router.engine_service.arrivals import Pace
from text_generation_router.engine_service.sinks import Outbox, Trial
from text_generation_router.engine_service.tests.raw_front import EngineWorld, RawFront, hello, serve, submit
from text_generation_router.engine_service.work import FrontCounts, FrontWork
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.wire.version import VERSION, WireError

ODD_NUMBERS = (0, 1, 2, 5, 255, 2**31 - 1, 2**32 - 1)
ODD_FLOATS = (0.0, 1.0, -1.0, 1e30, math.inf, math.nan)


def odd_ids(random: Random) -> bytes:
    ids = [random.choice((1, 2, 3, INFO.vocab_size - 1)) for _ in range(random.choice((0, 1, 5, 60)))]
    if not random.randrange(8):
        ids.append(random.choice((-1, INFO.vocab_size, 2**31 - 1)))
    return struct.pack(f"<{len(ids)}i", *ids) + b"x" * (not random.randrange(12))


def odd_submit(random: Random, index: int) -> pb.Submit:
    def number() -> int:
        return random.choice(ODD_NUMBERS)

    submit = pb.Submit(input_ids=odd_ids(random) or b"\1\0\0\0", max_new_tokens=random.choice((0, 1, 9, number())))
    for place in range(random.choice((0, 1, 1, 1, 3))):
        ids = odd_ids(random) if not random.randrange(3) else b""
        submit.sequences.add(index=index + place - (not random.randrange(9)), seed=number(), output_ids=ids)
    submit.parameters.temperature = submit.parameters.top_p = submit.parameters.repetition_penalty = 1.0
    submit.parameters.typical_p = 1.0
    if not random.randrange(3):
        setattr(submit.parameters, random.choice(("temperature", "top_p", "typical_p")), random.choice(ODD_FLOATS))
    submit.priority, submit.age_ms, submit.deadline_ms = -5, 2**63, random.choice((0, 1, 2**64 - 1))
    submit.served_elsewhere = random.choice((0.0, 7.0, 1e9, 2.0**53, random.choice(ODD_FLOATS)))
    submit.has_run = not random.randrange(2)
    submit.losses.suspicions, submit.losses.counts = number(), number()
    submit.stop_token_ids.extend([number()] * random.randrange(2))
    if not random.randrange(4):
        submit.prompt_logprobs = random.choice((0, 5))
    return submit


def odd_message(random: Random, index: int) -> pb.FrontMessage:
    about = random.choice((index, index - 1, 0, 2**64 - 1))
    number = random.choice(ODD_NUMBERS)
    return random.choice(
        (
            pb.FrontMessage(submit=odd_submit(random, index)),
            pb.FrontMessage(submit=odd_submit(random, index)),
            pb.FrontMessage(end=pb.End(index=about, count=number)),
            pb.FrontMessage(credit=pb.Credit(index=about, tokens=number)),
            pb.FrontMessage(cancel=pb.Cancel(index=about)),
            pb.FrontMessage(withdraw=pb.Withdraw(index=about)),
            *[pb.FrontMessage()] * (not random.randrange(30)),
        )
    )


@pytest.mark.parametrize("seed", range(4))
def test_odd_messages_end_at_most_their_own_stream(seed: int) -> None:
    random = Random(seed)

    async def use(world: EngineWorld) -> None:
        good = await world.front("good")
        counts = FrontCounts(Metrics().registry)
        broken = taken = 0
        for number in range(300):
            work = FrontWork(f"front-{number}", world.engine, Outbox(), counts, 64, lambda share: None, Trial())
            try:
                for index in range(10, 40, 10):
                    work.handle(odd_message(random, index))
            except WireError:
                broken += 1
            taken += work.num_open
            await asyncio.sleep(0.001 * random.randrange(2))
            work.close()
            assert not work.num_open
        assert broken > 50 and taken > 50
        await good.send(pb.FrontMessage(cancel=pb.Cancel(index=9)))
        for name in ("good", "new"):
            front = good if name == "good" else await world.front(name)
            message = pb.FrontMessage(submit=pb.Submit(input_ids=struct.pack("<4i", *prompt(1)), max_new_tokens=6))
            message.submit.sequences.add(index=1)
            message.submit.parameters.CopyFrom(_plain())
            await front.send(message)
            await front.until_ended(1)
            assert front.ids[1] == expected_tokens(prompt(1), 6)

    serve(use)


def _plain() -> "pb.generate__pb2.NextTokenChooserParameters":
    parameters = odd_submit(Random(0), 1).parameters
    parameters.temperature = parameters.top_p = parameters.typical_p = 1.0
    return parameters


Flood = Callable[[EngineWorld], Awaitable[None]]


async def cancelled_submits(world: EngineWorld) -> None:
    front = await world.front("bad")
    for index in range(1, 10**6):
        await front.send(submit([index], prompt(1), 400), pb.FrontMessage(cancel=pb.Cancel(index=index)))


async def credits(world: EngineWorld) -> None:
    front = await world.front("bad")
    await front.send(submit([1], prompt(1), 9, credits=0))
    while True:
        await front.send(pb.FrontMessage(credit=pb.Credit(index=1)))


async def unknown_cancels(world: EngineWorld) -> None:
    for number in count():  # one front would be let in at its pace
        front = await world.front(f"bad {number}")
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            while True:
                await front.send(pb.FrontMessage(cancel=pb.Cancel(index=7)))
        assert await front.code() is grpc.StatusCode.INVALID_ARGUMENT


async def large_submits(world: EngineWorld) -> None:
    front = await world.front("bad")
    message = submit([1], [1] * 200_000, 400)
    for index in range(1, 10**6):
        message.submit.sequences[0].index = index
        await front.send(message)


async def streams(world: EngineWorld) -> None:
    while True:
        front = RawFront(world.stub)
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await front.send(hello("bad"), submit([1], prompt(1), 400))
        await asyncio.sleep(0)


async def news_calls(world: EngineWorld) -> None:
    await world.front("bad")
    calls = deque(maxlen=500)
    while True:
        calls.append(world.stub.News(pb.NewsRequest(version=VERSION, front_id="bad", wants_cache=True)))
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "flood", [cancelled_submits, credits, unknown_cancels, large_submits, streams, news_calls], ids=lambda f: f.__name__
)
async def test_a_flood_of_one_front_changes_no_text_of_another(world: EngineWorld, flood: Flood) -> None:
    async with grpc.aio.insecure_channel(world.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        good = RawFront(pb_grpc.EngineServiceStub(channel))
        await good.connect("good")
        flooding = asyncio.create_task(flood(world))
        await asyncio.sleep(0.1)
        for index in range(1, 4):
            await good.send(submit([index], prompt(index), 60))
            await good.until_ended(index)
            assert good.ids[index] == expected_tokens(prompt(index), 60)
        await cancelled(flooding)


def test_messages_that_come_too_fast_wait() -> None:
    pace = Pace(10, 5, 100.0)
    assert [pace.take(4, 100.0) for _ in range(4)] == [0, 0, 0.4, 1.2]
    assert round(pace.take(1, 101.2), 6) == 0.2 and pace.take(1, 200.0) == 0


def test_a_front_that_says_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "HELLO_S", 0.05)
    monkeypatch.setattr(servicer, "REFUSED_AFTER_S", 0.0)

    async def use(world: EngineWorld) -> None:
        assert await RawFront(world.stub).code() is grpc.StatusCode.INVALID_ARGUMENT

    serve(use)


def test_no_more_fronts_than_the_most_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_FRONTS", 2)
    monkeypatch.setattr(servicer, "REFUSED_AFTER_S", 0.0)

    async def use(world: EngineWorld) -> None:
        fronts = [await world.front(name) for name in ("a", "b")]
        late = RawFront(world.stub)
        await late.send(hello("c"))
        assert await late.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        fronts[0].call.cancel()
        while world.metric("tgi_engine_fronts") > 1:
            await asyncio.sleep(0.005)
        await world.front("c")

    serve(use)
