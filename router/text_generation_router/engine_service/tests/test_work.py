"""A front's Work stream over a real server: every message, and every way to break the protocol."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from text_generation_common.cluster.endpoints import TcpEndpoint
from text_generation_common.errors import AddressInUse
from text_generation_proto import engine_pb2 as pb
from text_generation_proto import engine_pb2_grpc as pb_grpc
from text_generation_router.engine.tests.fakes import (
    INFO,
    FakeShards,
    dies_at,
    expected_logprobs,
    expected_tokens,
    fails,
    prompt,
)
from text_generation_router.engine_service import servicer, sinks, work
from text_generation_router.engine_service.server import EngineServer
from text_generation_router.engine_service.tests.raw_front import (
    IDENTITY,
    PERMITS,
    EngineWorld,
    RawFront,
    floats,
    hello,
    insecure,
    serve,
    submit,
)
from text_generation_router.engine_service.work import AT_ONCE
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.scheduling.request import Past
from text_generation_router.scheduling.step import ForwardStep, Step, StepAnswer
from text_generation_router.wire.version import VERSION, WITH_BEGUN

INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_a_front_is_welcomed_with_the_facts(world: EngineWorld) -> None:
    welcome = await RawFront(world.stub).connect()
    assert (welcome.version, welcome.engine_id, welcome.term, welcome.digest) == (VERSION, "engine-1", 3, b"digest")
    facts = welcome.facts
    assert (facts.epoch, facts.vocab_size, facts.max_batch_total_tokens) == (1, INFO.vocab_size, 500)
    assert Path(world.address.removeprefix("unix://")).stat().st_mode & 0o777 == 0o600


async def test_sequences_of_a_prompt_are_accepted_and_get_their_tokens_in_one_message_for_each_step(
    world: EngineWorld,
) -> None:
    front = await world.front()
    await front.send(submit([0, 5, 9], prompt(2), 7), submit([10], prompt(3), 4))
    ends = await front.until_ended(0, 5, 9, 10)
    assert [ended.reason for ended in ends] == [pb.LENGTH] * 4 and front.accepted == [0, 5, 9, 10]
    assert front.ids == {i: expected_tokens(prompt(2), 7) for i in (0, 5, 9)} | {10: expected_tokens(prompt(3), 4)}
    steps = [message.tokens for message in front.messages if message.HasField("tokens")]
    assert len(steps) <= len(world.forward_steps)
    firsts = [first for step in steps for first in step.firsts]
    assert sorted(first.index for first in firsts) == [0, 5, 9, 10]
    assert all(ended.HasField("queue_s") for ended in ends)


async def test_a_request_that_brings_tokens_goes_on_at_the_next_position(world: EngineWorld) -> None:
    whole = expected_tokens(prompt(1), 8)
    front = await world.front()
    await front.send(submit([1], prompt(1), 8, Past(tuple(whole[:3]), age_s=5, has_run=True)))
    await front.until_ended(1)
    assert front.ids[1] == whole[3:] and front.first_positions[1] == 3


def test_what_a_front_says_of_its_requests_is_done() -> None:
    async def use(world: EngineWorld) -> None:
        front = await world.front()
        await front.send(submit([1], prompt(1), 200), submit([2], prompt(2), 200), submit([3], prompt(3), 20))
        await front.until(lambda: len(front.ids.get(1, [])) > 2 and len(front.ids.get(2, [])) > 2)
        shards = world.groups.made[-1]
        shards.may_answer.clear()  # no request ends before the engine has read the messages about it
        await front.send(
            pb.FrontMessage(withdraw=pb.Withdraw(index=3)),  # first, for the others make room in the batch
            pb.FrontMessage(end=pb.End(index=1, count=2)),
            pb.FrontMessage(cancel=pb.Cancel(index=2)),
            pb.FrontMessage(cancel=pb.Cancel(index=99)),
        )
        while not world.metric("tgi_engine_dropped_messages_total"):  # messages are read in their order
            await asyncio.sleep(0.005)
        shards.may_answer.set()
        assert [ended.reason for ended in await front.until_ended(1, 2, 3)] == [pb.STOPPED, pb.CANCELLED, pb.WITHDRAWN]
        assert not front.ends[3].HasField("queue_s")

    serve(use, max_batch_size=2)


async def test_a_request_without_credits_waits_for_more(world: EngineWorld) -> None:
    front = await world.front()
    await front.send(submit([1], prompt(1), 12, credits=3), submit([2], prompt(2), 60))
    await front.until_ended(2)
    assert 3 <= len(front.ids[1]) <= 5
    await front.send(pb.FrontMessage(credit=pb.Credit(index=1, tokens=100)))
    await front.until_ended(1)
    assert front.ids[1] == expected_tokens(prompt(1), 12)


async def test_messages_about_unknown_requests_are_dropped_and_counted(world: EngineWorld) -> None:
    front = await world.front()
    await front.send(submit([4], prompt(0), 3))
    await front.until_ended(4)
    await front.send(*(pb.FrontMessage(cancel=pb.Cancel(index=index)) for index in (4, 99)))
    await front.send(submit([5], prompt(0), 3))
    await front.until_ended(5)
    assert world.metric("tgi_engine_dropped_messages_total") == 2


def test_requests_are_refused_together_with_a_reason() -> None:
    async def use(world: EngineWorld) -> None:
        front = await world.front()
        await front.send(submit([1], prompt(0), 497), submit([2, 3], prompt(1), 498))
        await front.send(submit([4], prompt(1), 300), submit(range(10, 15), [1] * 12, 5), submit([20], prompt(5), 5))
        await front.until(lambda: len(front.accepted) + len(front.refused) == 5)
        world.server.drain()
        await front.send(submit([30], prompt(0), 5))
        await front.until(lambda: len(front.refused) == 3)
        refused = [(list(one.indexes), one.reason) for one in front.refused]
        assert refused == [([2, 3], pb.TOO_LONG), ([10, 11, 12, 13, 14], pb.OVERLOADED), ([30], pb.DRAINING)]
        assert front.refused[1].retry_after_s >= 1
        for index in front.accepted:
            await front.send(pb.FrontMessage(cancel=pb.Cancel(index=index)))

    serve(use, max_queued_tokens=60, max_batch_size=1)


def test_a_front_is_told_which_requests_have_begun_before_their_first_tokens() -> None:
    async def use(world: EngineWorld) -> None:
        old, front = RawFront(world.stub), await world.front("new")
        await old.connect("old", version=WITH_BEGUN - 1)
        await old.send(submit([1], prompt(1), 40))
        await old.until(lambda: old.ids)
        await front.send(submit([4, 5], prompt(2), 3), submit([6], prompt(3), 3))
        await front.until(lambda: len(front.accepted) == 3)
        assert not front.begun, "the only row is taken"
        await front.until_ended(4, 5, 6)
        assert sorted(front.begun) == [4, 5, 6] and not old.begun
        kinds = [message.WhichOneof("message") for message in front.messages]
        assert kinds.index("begun") < kinds.index("tokens")

    serve(use, max_batch_size=1)


async def test_a_running_request_is_given_back_if_its_front_says_so(world: EngineWorld) -> None:
    front = await world.front()
    await front.send(submit([1], prompt(1), 400))
    await front.until(lambda: front.ids)
    await front.send(pb.FrontMessage(withdraw=pb.Withdraw(index=1)))
    await front.send(pb.FrontMessage(withdraw=pb.Withdraw(index=1, even_begun=True)))
    [end] = await front.until_ended(1)
    assert end.reason == pb.WITHDRAWN and front.ids[1] == expected_tokens(prompt(1), len(front.ids[1]))


class HeldShards(FakeShards):
    """Fake shards that answer no step until they may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def run(self, step: Step) -> StepAnswer | None:
        await self.may_answer.wait()
        return await super().run(step)


def test_suspects_of_one_group_are_taken_at_a_time_from_all_fronts() -> None:
    async def use(world: EngineWorld) -> None:
        fronts = [await world.front(name) for name in ("a", "b")]
        await fronts[0].send(submit([1], prompt(1), 9, credits=0, group="one"))
        await fronts[0].until(lambda: fronts[0].accepted)
        await fronts[1].send(
            submit([1], prompt(2), 3, group="two"), submit([2], prompt(2), 3, group="one"), submit([3], prompt(2), 3)
        )
        await fronts[1].until(lambda: fronts[1].refused and len(fronts[1].accepted) == 2)
        shards = world.groups.made[-1]
        assert isinstance(shards, HeldShards)
        shards.may_answer.set()  # until now the first suspect cannot have made its token
        await fronts[1].until_ended(2, 3)
        [refused] = fronts[1].refused
        assert refused.reason == pb.OTHER_SUSPECTS and list(refused.indexes) == [1]
        await fronts[0].until(lambda: fronts[0].ids)
        await fronts[1].send(submit([4], prompt(2), 3, group="two"))
        await fronts[1].until_ended(4)
        await fronts[0].send(pb.FrontMessage(cancel=pb.Cancel(index=1)))

    serve(use, HeldShards)


async def test_more_requests_than_a_front_may_have_are_refused(world: EngineWorld) -> None:
    front = await world.front()
    most = servicer.MAX_OPEN * PERMITS
    await front.send(submit(range(most), [1], 50), submit([most], [1], 5))
    await front.until(lambda: front.refused)
    assert len(front.accepted) == most and front.refused[0].reason == pb.OVERLOADED


async def test_log_probabilities_of_the_prompt_come_before_the_first_tokens(world: EngineWorld) -> None:
    front = await world.front()
    await front.send(submit([1], prompt(4), 3, prompt_logprobs=2))
    await front.until_ended(1)
    kinds = [message.WhichOneof("message") for message in front.messages]
    assert kinds[:4] == ["accepted", "begun", "prompt", "tokens"]
    piece = front.messages[2].prompt
    assert (piece.index, piece.start, piece.num_top) == (1, 1, 2)
    assert floats(piece.logprobs) == expected_logprobs(prompt(4))


def test_a_front_is_told_of_lost_shards_with_its_requests_aboard_and_of_the_next() -> None:
    async def use(world: EngineWorld) -> None:
        fronts = [await world.front(f"front-{i}") for i in range(2)]
        await fronts[0].send(submit([7], prompt(0), 6), submit([8], prompt(1), 6))
        await fronts[0].until_ended(7, 8)
        assert fronts[0].ids == {7: expected_tokens(prompt(0), 6), 8: expected_tokens(prompt(1), 6)}
        lost, ready = fronts[0].epochs
        assert lost.reason == "connection reset" and set(lost.aboard) <= {7, 8} and lost.aboard
        assert ready.is_ready and ready.facts.max_batch_total_tokens == 300
        await fronts[1].until(lambda: len(fronts[1].epochs) == 2)
        assert not fronts[1].epochs[0].aboard

    serve(use, dies_at(3), lambda: FakeShards(capacity=300))


def test_an_engine_that_is_closed_gives_its_requests_back_before_its_streams_end() -> None:
    async def use(world: EngineWorld) -> None:
        front = await world.front()
        await front.send(submit([1], prompt(0), 400), submit([2], prompt(1), 9, Past(has_run=True, suspicions=1)))
        await front.until(lambda: front.ids.get(1))
        await world.server.close()
        assert await front.code() is grpc.StatusCode.OK
        assert [ended.reason for ended in front.ends.values()] == [pb.ENGINE_CLOSED] * 2
        assert front.ends[2].losses.suspicions == 1

    serve(use, max_batch_size=1)


def test_an_engine_that_fails_ends_its_streams_and_no_request() -> None:
    """The fronts of a failed engine take the requests that had begun there for suspects."""

    def fail(step: ForwardStep) -> None:
        if step.number == 3:
            raise ZeroDivisionError

    async def use(world: EngineWorld) -> None:
        front = await world.front()
        await front.send(submit([1], prompt(0), 400))
        await world.engine.failed
        await world.server.close()
        assert await front.code() is grpc.StatusCode.OK and not front.ends and front.ids[1]

    serve(use, fails(fail))


@pytest.mark.parametrize("how", ["cancelled", "half-closed", "connected again"])
async def test_a_stream_that_ends_ends_its_requests(world: EngineWorld, how: str) -> None:
    front = await world.front()
    await front.send(submit([1, 2], prompt(0), 400))
    await front.until(lambda: front.ids.get(1))
    if how == "cancelled":
        front.call.cancel()
    elif how == "half-closed":
        await front.call.done_writing()
    else:
        again = await world.front()
        assert await front.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await again.send(submit([1], prompt(1), 3))
        await again.until_ended(1)
    async with asyncio.timeout(60):
        await world.until_idle()


def _misshapen() -> pb.FrontMessage:
    message = submit([1], prompt(0), 3)
    message.submit.input_ids += b"x"
    return message


def _large() -> pb.FrontMessage:
    message = submit([1], prompt(0), 3)
    message.submit.owner = "x" * (4 * INFO.max_positions + 2**20)
    return message


BREAKERS: dict[str, Callable[[], list[pb.FrontMessage]]] = {
    "no Hello": lambda: [submit([1], prompt(0), 3)],
    "an empty first message": lambda: [pb.FrontMessage()],
    "an old version": lambda: [hello("bad", 0)],
    "no name": lambda: [hello("")],
    "a long name": lambda: [hello("x" * 1000)],
    "Hello twice": lambda: [hello("bad"), hello("bad")],
    "an empty message": lambda: [hello("bad"), pb.FrontMessage()],
    "an index twice": lambda: [hello("bad"), *[submit([1], prompt(0), 300)] * 2],
    "an index twice in a Submit": lambda: [hello("bad"), submit([1, 1], prompt(0), 300)],
    "a falling index": lambda: [hello("bad"), submit([5], prompt(0), 300), submit([4], prompt(0), 300)],
    "no sequence": lambda: [hello("bad"), pb.FrontMessage(submit=pb.Submit())],
    "a token beyond the vocabulary": lambda: [hello("bad"), submit([1], [INFO.vocab_size], 3)],
    "half a token": lambda: [hello("bad"), _misshapen()],
    "a large Submit": lambda: [hello("bad"), _large()],
    "a flood": lambda: [hello("bad"), *[pb.FrontMessage(cancel=pb.Cancel(index=9))] * (AT_ONCE + 2000)],
}


@pytest.mark.parametrize("name", BREAKERS)
def test_a_front_that_breaks_the_protocol_is_disconnected_and_costs_the_others_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "PER_SECOND", 0)  # a slow machine must see a flood, too
    monkeypatch.setattr(servicer, "REFUSED_AFTER_S", 0.0)

    async def use(world: EngineWorld) -> None:
        good = await world.front("good")
        await good.send(submit([1], prompt(3), 40))
        bad = RawFront(world.stub)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream may end before all is sent
            await bad.send(*BREAKERS[name]())
        code = await bad.code()
        # A client that still writes may get only a reset from gRPC, so the engine's count shows whether there was a
        # flood.
        assert code is INVALID or (name == "a flood" and code is not grpc.StatusCode.OK)
        assert name != "a flood" or world.ends("protocol") == 1
        await good.until_ended(1)
        assert good.ids[1] == expected_tokens(prompt(3), 40)

    serve(use)


async def test_bytes_that_are_not_a_message_end_the_stream(world: EngineWorld) -> None:
    async with grpc.aio.insecure_channel(world.address) as channel:
        call = channel.stream_stream("/engine.v1.EngineService/Work")()
        await call.write(hello("bad").SerializeToString())
        await call.read()
        await call.write(b"\xff\xff\xff")
        assert await call.code() is INVALID
    await world.front()


def test_a_front_that_does_not_read_is_lost_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "STALL_S", 1.0)  # on a busy machine the good front reads later, too

    async def use(world: EngineWorld) -> None:
        good = await world.front("good")
        await good.send(submit([1], prompt(3), 60))
        options = [("grpc.http2.bdp_probe", 0)]  # otherwise the client's gRPC takes megabytes without being asked
        async with grpc.aio.insecure_channel(world.address, options=options) as channel:
            bad = RawFront(pb_grpc.EngineServiceStub(channel))
            await bad.send(hello("bad"), submit(range(4), [1] * 50, 20, prompt_logprobs=1000))
            await good.until_ended(1)
            assert good.ids[1] == expected_tokens(prompt(3), 60)
            while world.metric("tgi_engine_fronts") > 1:
                await asyncio.sleep(0.02)
        assert world.ends("unread") == 1

    serve(use)


async def test_two_engines_do_not_share_a_port(world: EngineWorld) -> None:
    server = EngineServer(world.engine, IDENTITY, Metrics(), PERMITS, insecure())
    port = await server.listen(TcpEndpoint("127.0.0.1", 0))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        front = RawFront(pb_grpc.EngineServiceStub(channel))
        assert (await front.connect()).engine_id == "engine-1"
        front.call.cancel()
    other = EngineServer(world.engine, IDENTITY, Metrics(), PERMITS, insecure())
    with pytest.raises(AddressInUse):
        await other.listen(TcpEndpoint("127.0.0.1", port))
    await server.close()
