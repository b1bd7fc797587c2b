"""RemoteEngine over real gRPC: fake engines on unix sockets end, fall silent, break the protocol and come back."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from text_generation_common.cluster.endpoints import UnixEndpoint
from text_generation_common.cluster.identity import Role
from text_generation_common.cluster.security import Security
from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.tests.fakes import Listener, expected_tokens
from text_generation_router.errors import Refusal, RefusedError
from text_generation_router.fleet import connection, values
from text_generation_router.fleet.cache_news import MAX_HASHES
from text_generation_router.fleet.choice import EngineLoad
from text_generation_router.fleet.connection import WRITE_FAILED
from text_generation_router.fleet.engine import RemoteEngine
from text_generation_router.fleet.placement import BestScore, Placement
from text_generation_router.fleet.tests.engines import SNAPSHOT
from text_generation_router.fleet.tests.fake_service import FakeService
from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.scheduling.request import EndReason, GenerationRequest
from text_generation_router.wire.steps import pieces_of
from text_generation_router.wire.version import UINT64, packed

PROMPTS = [[1, 2, 3], [4, 5], [6]]


class Asker:
    """A front with one or two addresses of engines."""

    def __init__(self, folder: Path, engines: int, placement: Placement | None = None) -> None:
        self.paths = [str(folder / f"engine-{number}") for number in range(engines)]
        self.endpoints = [UnixEndpoint(path) for path in self.paths]
        security = Security(Role.FRONT, None, insecure=False, logger=logging.getLogger("test"))
        self.engine = RemoteEngine(self.endpoints, security, placement)

    def submit(
        self, ids: list[int], count: int, copies: int = 1, credits: int = 512, **options: object
    ) -> tuple[list[Listener], "asyncio.Future[None]"]:
        listeners = [Listener() for _ in range(copies)]
        requests = [GenerationRequest(tuple(ids), count, **options) for _ in listeners]  # type: ignore[arg-type]
        indexes, answer = self.engine.submit_all(requests, listeners, credits)
        for listener, index in zip(listeners, indexes, strict=True):
            listener.index = index
        assert answer is not None
        return listeners, answer

    def ask(self, ids: list[int], count: int, **options: object) -> Listener:
        [listener], _ = self.submit(ids, count, **options)  # type: ignore[arg-type]
        return listener


@asynccontextmanager
async def opened(folder: Path, engines: int = 1, placement: Placement | None = None) -> AsyncIterator[Asker]:
    before = asyncio.all_tasks()
    front = Asker(folder, engines, placement)
    try:
        async with asyncio.timeout(60):
            yield front
    finally:
        await front.engine.close()
    await asyncio.sleep(0)
    ours = [task for task in asyncio.all_tasks() - before if "engine" in task.get_name()]
    assert [task for task in ours if not task.cancelling()] == []


@pytest.fixture
def front(tmp_path: Path) -> AbstractAsyncContextManager[Asker]:
    return opened(tmp_path)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.002)


async def test_texts_are_those_of_the_engine_and_facts_are_told(front: Asker) -> None:
    async with FakeService(front.paths[0]) as service:
        await front.engine.start()
        listeners, answer = front.submit([1, 2, 3], 20, copies=2)
        await answer
        for listener in (*listeners, front.ask([4], 3)):
            await listener.until_end()
        assert [listener.ids for listener in listeners] == [expected_tokens([1, 2, 3], 20)] * 2
        first = listeners[0].given[0].first
        assert first is not None and first.cached_tokens == 1 and first.queue_s >= 0
        end = listeners[0].end
        assert end is not None and 0 < end.inference_s < 20 and end.queue_s == first.queue_s
        assert front.engine.snapshot() == SNAPSHOT and front.engine.permits == 8
        assert front.engine.load().retry_after_s == 3 and await front.engine.is_healthy()
        service.load = pb.Load(is_ready=True, running=1, waiting=2, waiting_tokens=3, computing_tokens=4, permits=5)
        await until(lambda: front.engine.permits == 5)
        assert front.engine._fleet.engines[0].report.load == EngineLoad(1, 2, 3, 4)
        service.healthy = False
        assert not await front.engine.is_healthy()
        assert [len(submit) for submit in service.submits] == [2, 1] and len(service.hellos) == 1


async def test_streams_outlive_their_engine_and_give_the_same_texts(front: Asker) -> None:
    async with FakeService(front.paths[0], max_tokens=31):
        await front.engine.start()
        listeners = [front.ask(ids, 40) for ids in PROMPTS]
        await until(lambda: sum(len(listener.ids) for listener in listeners) == 31)
    await until(lambda: front.engine.counts.lost_engines == 1)
    assert front.engine.permits == 8 and not await front.engine.is_healthy()
    late = front.ask([7], 5)  # no engine is there, so the request waits
    async with FakeService(front.paths[0], term=2) as service:
        assert [await listener.all_ids() for listener in listeners] == [expected_tokens(p, 40) for p in PROMPTS]
        assert await late.all_ids() == expected_tokens([7], 5)
        assert sorted(submit[0].past.has_run for submit in service.submits) == [False, True, True, True]
    assert front.engine.counts.resumes == 3
    assert all(len(listener.end.replays) == 1 for listener in listeners if listener.end)


async def test_requests_go_on_with_another_engine_at_once(tmp_path: Path) -> None:
    async with (
        opened(tmp_path, 2) as front,
        FakeService(front.paths[0], max_tokens=9) as first,
        FakeService(front.paths[1]) as second,
    ):
        await front.engine.start()
        await until(lambda: len(front.engine._fleet.engines) == 2)
        listeners = [front.ask(ids, 30) for ids in PROMPTS * 2]
        await until(lambda: first.made == 9)
        await first.die()
        assert [await each.all_ids() for each in listeners] == [expected_tokens(ids, 30) for ids in PROMPTS * 2]
        assert first.submits and second.submits


async def test_the_engine_may_come_later_than_its_front(front: Asker) -> None:
    starting = asyncio.create_task(front.engine.start())
    await asyncio.sleep(0.1)
    assert not starting.done()
    async with FakeService(front.paths[0]):
        await starting
        assert await front.ask([1], 4).all_ids() == expected_tokens([1], 4)


@pytest.mark.parametrize("reason", [Refusal.OVERLOADED, Refusal.TOO_LONG])
async def test_a_refusal_is_the_answer(front: Asker, reason: Refusal) -> None:
    async with FakeService(front.paths[0], refusal=RefusedError(reason, 17)):
        await front.engine.start()
        listeners, answer = front.submit([1], 4, copies=3, timeout_s=100.0)
        with pytest.raises(RefusedError) as refused:
            await answer
        assert refused.value.reason is reason and (refused.value.retry_after_s == 17)
        assert all(listener.end is None for listener in listeners) and not front.engine._deadlines._timers


async def test_deadlines_hold_while_no_engine_is_there(front: Asker) -> None:
    async with FakeService(front.paths[0], max_tokens=4):
        await front.engine.start()
        begun = front.ask([1], 9, timeout_s=1.0)
        await begun.until_tokens(4)
    [waiting], answer = front.submit([2], 9, timeout_s=0.05)
    await answer
    for listener, ids in ((waiting, []), (begun, expected_tokens([1], 4))):
        end = await listener.until_end()
        assert end.reason is EndReason.DEADLINE and listener.ids == ids


async def test_local_ends_are_at_once_and_late_tokens_change_nothing(front: Asker) -> None:
    async with FakeService(front.paths[0]) as service:
        await front.engine.start()
        stopped, cancelled, other = (front.ask([number], 400) for number in (1, 2, 3))
        for listener in (stopped, cancelled):
            await listener.until_tokens(5)
        front.engine.end(stopped.index, 3)
        front.engine.cancel(cancelled.index)
        assert stopped.end is not None and stopped.end.reason is EndReason.STOPPED
        assert cancelled.end is not None and cancelled.end.reason is EndReason.CANCELLED
        front.engine.end(stopped.index, 3)
        assert await other.all_ids() == expected_tokens([3], 400)
        assert sorted(service.orders) == ["cancel", "end", "submit", "submit", "submit"]
        assert front.engine.counts.late >= 2 and front.engine.counts.broken_rules == 0


async def test_credits_reach_the_engine(front: Asker) -> None:
    async with FakeService(front.paths[0]) as service:
        await front.engine.start()
        listener = front.ask([1], 9, credits=4)
        await listener.until_tokens(4)
        await asyncio.sleep(0.02)
        assert len(listener.ids) == 4
        front.engine.credit(listener.index, 5)
        assert await listener.all_ids() == expected_tokens([1], 9) and "credit" in service.orders


async def test_a_silent_engine_is_lost_and_its_requests_go_on_elsewhere(tmp_path: Path, monkeypatch) -> None:
    async with (
        opened(tmp_path, 2) as front,
        FakeService(front.paths[0], max_tokens=7) as silent,
        FakeService(front.paths[1]) as other,
    ):
        other.load.is_draining = True
        await front.engine.start()
        engines = front.engine._fleet.engines
        await until(lambda: sorted(view.report.load.is_draining for view in engines.values()) == [False, True])
        listener = front.ask([1], 30)
        await listener.until_tokens(7)
        silent.tells_load = False
        # A busy machine may delay what the other engine says.
        monkeypatch.setattr(connection, "SILENT_S", connection.STOPPED_S)
        other.load.is_draining = False
        assert await listener.all_ids() == expected_tokens([1], 30)
        assert front.engine.counts.lost_engines >= 1 and 1 not in front.engine._fleet.suspects


@pytest.mark.parametrize("end", ["dies", "dies while the front writes", "is silent, then dies"])
async def test_requests_of_an_engine_that_dies_are_suspects_unless_it_was_silent_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    is_silent = end == "is silent, then dies"
    if is_silent:  # a busy machine may delay what another engine says
        monkeypatch.setattr(connection, "QUIET_S", 0.2)

    async def write_to_a_dead_engine(call: Any, message: pb.FrontMessage) -> None:
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), WRITE_FAILED)

    async with opened(tmp_path) as front:
        async with FakeService(front.paths[0], max_tokens=4) as service:
            await front.engine.start()
            listener = front.ask([1], 30)
            await listener.until_tokens(4)
            [view], loop = front.engine._fleet.engines.values(), asyncio.get_running_loop()
            since_s, service.tells_load = loop.time(), not is_silent
            await until(lambda: loop.time() - view.heard_s > 0.2 if is_silent else view.heard_s > since_s)
            if end == "dies while the front writes":
                monkeypatch.setattr("text_generation_router.fleet.connection._send", write_to_a_dead_engine)
                front.engine.credit(listener.index, 5)
        await until(lambda: front.engine.counts.lost_engines == 1)
        assert (listener.index in front.engine._fleet.suspects) is not is_silent


async def test_an_engine_that_answers_no_submit_is_cut_off(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("text_generation_router.fleet.connection.ANSWER_S", 0.1)
    async with opened(tmp_path) as front, FakeService(front.paths[0], answers=False) as service:
        await front.engine.start()
        listener = front.ask([1], 3)
        await until(lambda: front.engine.counts.broken_rules > 0)
        service.answers = True
        assert await listener.all_ids() == expected_tokens([1], 3)


def foreign(message: pb.EngineMessage) -> pb.EngineMessage:
    return pb.EngineMessage()


def misshapen(message: pb.EngineMessage) -> pb.EngineMessage:
    message.tokens.ids += bytes(4)
    return message


def outside_of_the_vocabulary(message: pb.EngineMessage) -> pb.EngineMessage:
    message.tokens.ids = np.full(len(message.tokens.ids) // 4, 256, "<i4").tobytes()
    return message


def missing(message: pb.EngineMessage) -> None:
    return None


@pytest.mark.parametrize("lie", [missing, misshapen, outside_of_the_vocabulary, foreign])
async def test_an_engine_that_lies_is_cut_off_and_texts_stay_right(
    tmp_path: Path, lie: Callable[[pb.EngineMessage], pb.EngineMessage | None]
) -> None:
    turns = count()

    def seventh(message: pb.EngineMessage) -> pb.EngineMessage | None:
        is_due = message.HasField("tokens") and not message.tokens.ended and next(turns) % 7 == 6
        return lie(message) if is_due else message

    async with opened(tmp_path) as front, FakeService(front.paths[0], alter=seventh):
        await front.engine.start()
        listeners = [front.ask(ids, 20) for ids in PROMPTS]
        assert [await listener.all_ids() for listener in listeners] == [expected_tokens(p, 20) for p in PROMPTS]
        assert front.engine.counts.broken_rules >= 2


async def test_tokens_that_are_told_twice_are_given_once(front: Asker) -> None:
    async with FakeService(front.paths[0]) as service:

        def twice(message: pb.EngineMessage) -> pb.EngineMessage:
            if message.HasField("tokens") and not message.tokens.ended:
                service.send_twice.append(message)  # type: ignore[attr-defined]
                service.send(pb.EngineMessage(tokens=pb.Tokens.FromString(message.tokens.SerializeToString())))
                service.alter = lambda again: setattr(service, "alter", twice) or again
            return message

        service.send_twice, service.alter = [], twice  # type: ignore[attr-defined]
        await front.engine.start()
        listener = front.ask([1], 20)
        assert await listener.all_ids() == expected_tokens([1], 20)
        assert front.engine.counts.dropped_tokens > 0 and front.engine.counts.broken_rules == 0


async def test_an_engine_of_an_unknown_version_is_not_used(tmp_path: Path) -> None:
    async with (
        opened(tmp_path, 2) as front,
        FakeService(front.paths[0], version=0),
        FakeService(front.paths[1]) as good,
    ):
        await front.engine.start()
        assert await front.ask([1], 3).all_ids() == expected_tokens([1], 3) and len(good.submits) == 1
        assert front.engine.counts.broken_rules >= 1


async def test_a_news_call_that_ends_is_made_again_and_costs_nothing(front: Asker) -> None:
    async with FakeService(front.paths[0]) as service:
        await front.engine.start()
        service.end_news()
        await until(lambda: service.num_news == 2)
        assert await front.ask([1], 3).all_ids() == expected_tokens([1], 3)
        assert front.engine.counts.lost_engines == 0 and len(service.hellos) == 1


def news(sequence: int, added: list[int], is_snapshot: bool = False) -> pb.Cache:
    return pb.Cache(sequence=sequence, is_snapshot=is_snapshot, added=packed(added, UINT64))


async def test_news_of_caches_are_wanted_while_there_are_several_engines_and_told_again_after_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "WATCH_S", 0.01)
    placement = BestScore(bytes(32))

    def known(number: int) -> int:
        return placement.index.num_blocks(number)

    async with opened(tmp_path, 2, placement) as front:
        async with FakeService(front.paths[0]) as first:
            first.caches = lambda: [news(1, [1, 2], True), news(2, [3]), *([news(4, [5])] * (len(calls) < 3))]
            calls = first.wanted_cache
            await front.engine.start()
            await until(lambda: bool(calls))
            await asyncio.sleep(0.1)
            assert calls == [False] and not known(0)
            async with FakeService(front.paths[1]):
                await until(lambda: calls == [False, True, True])
                await until(lambda: known(0) == 3)
                assert front.engine.counts.news_gaps == 1 and front.engine.num_cached_blocks == 3
            await until(lambda: calls == [False, True, True, False])
        assert not front.engine.counts.broken_rules


@pytest.mark.parametrize(
    "cache", [news(1, list(range(MAX_HASHES + 1)), True), pb.Cache(sequence=1, is_snapshot=True, removed=b"1234567")]
)
async def test_an_engine_that_tells_nonsense_of_its_cache_is_cut_off(tmp_path: Path, cache: pb.Cache) -> None:
    async with (
        opened(tmp_path, 2, BestScore(bytes(32))) as front,
        FakeService(front.paths[0]) as liar,
        FakeService(front.paths[1]),
    ):
        liar.caches = lambda: [cache]
        await front.engine.start()
        await until(lambda: front.engine.counts.broken_rules > 0)
        assert await front.ask([1, 2], 30).all_ids() == expected_tokens([1, 2], 30)


async def test_an_engine_that_floods_a_front_with_news_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "BURST_BYTES", 200_000)
    monkeypatch.setattr(values, "BYTES_PER_S", 20_000)  # a busy machine may send less than the usual rate
    async with (
        opened(tmp_path, 2, BestScore(bytes(32))) as front,
        FakeService(front.paths[0]) as liar,
        FakeService(front.paths[1]),
    ):
        liar.caches = lambda: (news(number, [number], number == 1) for number in count(1))
        await front.engine.start()
        await until(lambda: front.engine.counts.broken_rules > 0)
        assert await front.ask([1, 2], 30).all_ids() == expected_tokens([1, 2], 30)


async def test_engines_are_added_and_taken_away(tmp_path: Path) -> None:
    async with (
        opened(tmp_path, 2) as front,
        FakeService(front.paths[0]) as first,
        FakeService(front.paths[1]) as second,
    ):
        await front.engine.start()
        await until(lambda: len(second.hellos) == 1)
        listener = front.ask([1], 300)
        await listener.until_tokens(2)
        await front.engine.connect(front.endpoints[1:] if first.submits else front.endpoints[:1])
        assert await listener.all_ids() == expected_tokens([1], 300)
        assert len(first.submits) == len(second.submits) == 1
        await front.engine.connect(front.endpoints)
        await until(lambda: len(first.hellos) + len(second.hellos) == 3)


async def test_log_probabilities_of_a_prompt_come_with_its_first_token(front: Asker) -> None:
    async with FakeService(front.paths[0]) as service:
        known = PromptLogprobs(np.arange(2, dtype=np.float32), np.ones((2, 1), np.int32), np.zeros((2, 1), np.float32))

        def with_prompt(message: pb.EngineMessage) -> pb.EngineMessage:
            if not message.HasField("accepted"):
                return message
            for piece in pieces_of(message.accepted.indexes[0], known):
                service.send(pb.EngineMessage(prompt=piece))
            return message

        service.alter = with_prompt
        await front.engine.start()
        listener = front.ask([1, 2, 3], 2, prompt_logprobs=1)
        await listener.until_end()
        first = listener.given[0].first
        assert first is not None and first.prompt_logprobs is not None
        assert first.prompt_logprobs.logprobs_P.tolist() == [0.0, 1.0]


async def test_closing_ends_every_request_and_warns_of_no_lost_engine(
    front: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeService(front.paths[0], max_tokens=2):
        await front.engine.start()
        [begun], _ = front.submit([1], 9)
        await begun.until_tokens(2)
        await front.engine.close()
        assert begun.end is not None and begun.end.reason is EndReason.CLOSED
        with pytest.raises(RefusedError):
            front.submit([1], 9)
    assert not [record for record in caplog.records if "lost" in record.getMessage()]
