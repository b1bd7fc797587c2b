"""The messages sent to a group of shards, as frames and as gRPC calls, and how the answers are read."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from text_generation_common.frames import HEADER, FrameReader, pack
from text_generation_common.sampling import Sampling
from text_generation_proto import generate_pb2 as pb
from text_generation_proto import generate_pb2_grpc as pb_grpc
from text_generation_router.engine import shards
from text_generation_router.engine.shards import ModelInfo, ShardedClient, ShardView, WarmupAnswer
from text_generation_router.engine.step_connection import StepConnection
from text_generation_router.errors import ShardsError, StepAbortedError, StepFailedError, WarmupRefusedError
from text_generation_router.scheduling.costs import QueryBlocks
from text_generation_router.scheduling.step import (
    BATCH_ID,
    AdapterStep,
    Chunk,
    ClearStep,
    FilterStep,
    FirstChunk,
    ForwardStep,
)

EPOCH = 4


class Rank(pb_grpc.TextGenerationServiceServicer):
    """A fake shard: records the calls, answers according to its rank, or refuses with status `refusal`."""

    def __init__(self, rank: int, urls: list[str]) -> None:
        self.rank, self.urls = rank, urls
        self.asked: list[Any] = []
        self.refusal: grpc.StatusCode | None = None
        self.is_stuck = False
        self.frames = 0  # number of steps that came as frames
        self.tops = 2  # number of top tokens in an answer
        self.prompts: dict[str, bytes] = {}  # fields of an answer with log-probabilities of prompts
        self.computed: list[pb.ComputedRow] = []
        self.health = [pb.HealthResponse(epoch=EPOCH)]  # one answer after the other

    async def _note(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        if self.refusal is not None:
            await context.abort(self.refusal, f"rank {self.rank} does not want to")

    async def ServiceDiscovery(self, request: Any, context: Any) -> Any:
        await self._note(request, context)
        return pb.ServiceDiscoveryResponse(urls=self.urls)

    async def Info(self, request: Any, context: Any) -> Any:
        await self._note(request, context)
        return pb.InfoResponse(
            dtype="torch.bfloat16", device_type="cuda", epoch=EPOCH, world_size=2, vocab_size=320,
            max_positions=512, eos_token_ids=[2, 7], kernels="triton", slots=100 + self.rank, rows=3 + self.rank,
            block_queries=32, queries_per_token=4, grammar_refusal="no bytes",
        )  # fmt: skip

    async def Health(self, request: Any, context: Any) -> Any:
        await self._note(request, context)
        if self.is_stuck:
            await asyncio.Event().wait()
        return self.health.pop(0) if len(self.health) > 1 else self.health[0]

    async def Warmup(self, request: Any, context: Any) -> Any:
        await self._note(request, context)
        return pb.WarmupResponse(
            max_supported_total_tokens=900 - self.rank,
            max_total_tokens=200 + self.rank,
            has_kept_cache=request.known_content > self.rank,
            computed=self.computed,
        )

    async def CompileGrammar(self, request: Any, context: Any) -> Any:
        await self._note(request, context)
        if self.is_stuck:
            await asyncio.Event().wait()
        return pb.CompileGrammarResponse(refusal="too complex" if request.grammar == "bad" else "")

    async def PrepareAdapter(self, request: Any, context: Any) -> Any:
        await self._note(request, context)
        return pb.PrepareAdapterResponse(refusal="gone" if self.rank and request.digest == "bad" else "")

    async def LoadAdapter(self, request: Any, context: Any) -> Any:
        await self._note(request, context)
        return pb.LoadAdapterResponse(refusal="gone" if request.digest == "bad" else "")

    async def ClearCache(self, request: Any, context: Any) -> Any:
        await self._note(request, context)
        return pb.ClearCacheResponse()

    async def FilterBatch(self, request: Any, context: Any) -> Any:
        await self._note(request, context)
        return pb.FilterBatchResponse()

    async def Prefill(self, request: Any, context: Any) -> Any:
        await self._note(request, context)
        return pb.PrefillResponse(forward_ns=30, total_ns=40, result=self._result(request.step))

    async def Decode(self, request: Any, context: Any) -> Any:
        await self._note(request, context)
        return pb.DecodeResponse(forward_ns=10, total_ns=20, result=self._result(request.step))

    def _result(self, step: int) -> Any:
        if self.rank:
            return pb.StepResult(step=step)  # only rank 0 sends tokens
        return pb.StepResult(
            step=step, request_ids=np.array([9, 2**40], "<u8").tobytes(), token_ids=np.array([17, 18], "<i4").tobytes(),
            logprobs=np.array([-0.5, -1.5], "<f4").tobytes(), top_counts=np.array([0, self.tops], "<u4").tobytes(),
            top_ids=np.arange(self.tops, dtype="<i4").tobytes(),
            top_logprobs=np.negative(np.arange(self.tops, dtype="<f4")).tobytes(),
            gap_ns=6, successor_queued=True, complete_ids=np.array([2**40], "<u8").tobytes(),
            failures=[pb.FailedRequest(id=9, reason="too complex")], **self.prompts,
        )  # fmt: skip


class RefusedError(Exception):
    pass


class FrameContext:
    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise RefusedError(code.value[0], details)


KINDS = {1: ("Prefill", pb.PrefillRequest), 2: ("Decode", pb.DecodeRequest), 3: ("FilterBatch", pb.FilterBatchRequest),
         4: ("ClearCache", pb.ClearCacheRequest), 5: ("LoadAdapter", pb.LoadAdapterRequest)}  # fmt: skip


async def listen_for_frames(rank: Rank, path: str) -> asyncio.Server:
    """Lets a rank take steps as frames."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        while data := await reader.read(2**16):
            for kind, step, message in frames.feed(data):
                rank.frames += 1
                name, request = KINDS[kind]
                try:
                    answer = await getattr(rank, name)(request.FromString(message), FrameContext())
                    writer.write(pack(0, step, answer.SerializeToString()))
                except RefusedError as error:
                    writer.write(pack(error.args[0], step, error.args[1].encode()))
        writer.close()

    return await asyncio.start_unix_server(talk, path)


@pytest.fixture(params=["frames", "calls"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder for sockets; its name says how the fake shards take steps."""
    folder = tmp_path / str(request.param)
    folder.mkdir()
    return folder


@asynccontextmanager
async def over(
    path: Path, size: int = 2, *health: list[pb.HealthResponse]
) -> AsyncIterator[tuple[ShardedClient, list[Rank]]]:
    """`health`: what each rank answers before the client is connected, if that takes over."""
    urls = [f"unix://{path}/s-{rank}" for rank in range(size)]
    ranks = [Rank(rank, urls) for rank in range(size)]
    for rank, answers in zip(ranks, health, strict=False):
        rank.health = answers
    servers, sockets = [], []
    for rank, url in zip(ranks, urls, strict=True):
        servers.append(grpc.aio.server())
        pb_grpc.add_TextGenerationServiceServicer_to_server(rank, servers[-1])
        servers[-1].add_insecure_port(url)
        await servers[-1].start()
        if path.name == "frames":
            sockets.append(await listen_for_frames(rank, f"{path}/s-{rank.rank}.steps"))
    try:
        group = await ShardedClient.connect(f"{path}/s-0", takes_over=bool(health))
        for rank in ranks:
            rank.asked.clear()
        try:
            async with asyncio.timeout(20):
                yield group, ranks
        finally:
            await group.close()
    finally:
        for server in servers:
            await server.stop(grace=None)
        for listening in sockets:
            listening.close()
            await listening.wait_closed()
        await asyncio.sleep(0.01)  # the connections close


def first(**sampling: Any) -> FirstChunk:
    return FirstChunk((3, 4, 5), np.array([30, 40, 50], np.int32), 2, Sampling(**sampling))


async def test_the_first_shard_says_what_the_model_is_and_where_the_others_are(place: Path) -> None:
    async with over(place) as (group, ranks):
        blocks = QueryBlocks(32, 4)
        assert group.info == ModelInfo(
            "torch.bfloat16", "cuda", 320, 512, (2, 7), "triton", 2, EPOCH, blocks, "no bytes"
        )
        assert group.epoch == EPOCH
        assert await group.views() == [ShardView(3, 100), ShardView(4, 101)]
        assert await group.is_healthy() and [len(rank.asked) for rank in ranks] == [2, 2]


async def test_a_warm_up_asks_all_ranks_and_the_smallest_counts(place: Path) -> None:
    async with over(place) as (group, ranks):
        assert await group.warmup(64, 200, 16, 1000, 8) == WarmupAnswer(899, 200)
        assert await group.warmup(64, None, 16, None, None, content=9, known_content=1) == WarmupAnswer(899, 200)
        assert await group.warmup(64, None, 16, None, None, known_content=2) == WarmupAnswer(899, 200, True)
        for rank in ranks:
            full, least, _ = rank.asked
            assert full == pb.WarmupRequest(
                max_prefill_tokens=64, max_total_tokens=200, max_concurrent_requests=16, max_batch_total_tokens=1000,
                epoch=EPOCH, max_batch_size=8,
            )  # fmt: skip
            chosen = ("max_total_tokens", "max_batch_total_tokens", "max_batch_size")
            assert not any(least.HasField(name) for name in chosen)
            assert (least.content, least.known_content) == (9, 1)


def health(last_step: int, **more: int) -> pb.HealthResponse:
    return pb.HealthResponse(last_step=last_step, **more)


async def test_ranks_are_taken_when_they_have_run_the_same_steps_and_none_can_come_of_an_engine_before(
    place: Path,
) -> None:
    one = [health(7, pending=1), health(8), health(8), health(8), health(9), health(9)]
    other = [health(8), health(8, pending=1), health(8, step_clients=1), health(9), health(9)]
    async with over(place, 2, one, other) as (_, ranks):
        assert [len(rank.health) for rank in ranks] == [1, 1]


async def test_ranks_of_which_one_waits_for_the_other_s_step_are_given_up(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SETTLE_S", 0.05)
    moving = [health(8, pending=1, progress=progress) for progress in range(10)]
    async with over(place, 1, [health(8, pending=1)]):
        pass  # a rank alone waits for no other
    with pytest.raises(ShardsError, match="another webserver is connected"):
        async with over(place, 1, [health(8, step_clients=1)]):
            pass  # a step of the engine before may still come
    still = [*[health(8, longest_pause_ms=5000)] * 40, health(9)]  # 0.2 s without progress
    async with over(place, 2, still, [health(9)]):
        assert len(still) == 1, "a rank with long steps is waited for"
    with pytest.raises(ShardsError, match="ended between the calls"):
        async with over(place, 2, moving, [health(7)]):
            pass
    assert len(moving) == 1, "a rank that gets on is waited for"


async def test_a_client_beside_an_engine_does_not_wait_for_its_end(place: Path) -> None:
    async with over(place) as (_, ranks):
        ranks[0].health = [health(8, step_clients=1)]
        await (await ShardedClient.connect(f"{place}/s-0")).close()
        assert pb.HealthRequest() not in ranks[0].asked


@pytest.mark.parametrize(("size", "are_equal"), [(1, True), (2, True), (2, False)])
async def test_a_note_brings_back_what_was_computed_for_an_engine_before_if_all_ranks_say_the_same(
    place: Path, size: int, are_equal: bool
) -> None:
    namespace = ("salt", "\ud800", '"')
    chunks = [Chunk(i, 0, 3, True, replace(first(), namespace=of)) for i, of in enumerate((namespace, (), None))]
    async with over(place, size) as (group, ranks):
        await group.run(ForwardStep(1, (), np.empty(0, np.int32), tuple(chunks)))
        for rank in ranks:
            notes = [request.note for request in rank.asked[0].batch.requests]
            assert all(notes[:2]) and not notes[2]
            numbers = np.array([3, 4], "<i4").tobytes(), np.array([30, 40], "<i4").tobytes()
            rank.computed = [pb.ComputedRow(note=note, ids=numbers[0], slots=numbers[1]) for note in notes[:2]]
        if not are_equal:
            ranks[1].computed[1].ids = numbers[1]
        found = (await group.warmup(64, 200, 16, 1000, 8)).computed
    told = [(h.namespace, h.ids.tolist(), h.slots.tolist()) for h in found]
    assert told == [(of, [3, 4], [30, 40]) for of in (namespace, ()) if are_equal]


async def test_a_step_with_chunks_carries_the_whole_request(place: Path) -> None:
    sampling = dict(
        temperature=0.5, top_k=7, top_p=0.25, typical_p=0.75, do_sample=True, seed=2**64 - 1, repetition_penalty=1.5,
        frequency_penalty=-0.5, watermark=True,
    )  # fmt: skip
    chunks = (Chunk(9, 0, 2, False, first(top_n_tokens=3, **sampling)), Chunk(8, 4, 6, True, None))
    step = ForwardStep(5, (1, 2), np.array([70, 80], np.int32), chunks)
    async with over(place) as (group, ranks):
        answer = await group.run(step)
        assert answer is not None and (answer.forward_ns, answer.total_ns) == (30, 40)
        for rank in ranks:
            (asked,) = rank.asked
            assert (asked.epoch, asked.step, asked.batch.id, asked.batch.size) == (EPOCH, 5, BATCH_ID, 2)
            assert np.frombuffer(asked.slots, "<i4").tolist() == [70, 80]
            assert asked.cached_batch == pb.CachedBatch(id=BATCH_ID, request_ids=[1, 2], size=2)
            new, later = asked.batch.requests
            assert (new.id, new.start, new.end, new.last, new.prompt_length, new.top_n_tokens) == (9, 0, 2, False, 2, 3)
            assert np.frombuffer(new.ids, "<i4").tolist() == [3, 4, 5]
            assert np.frombuffer(new.slots, "<i4").tolist() == [30, 40, 50]
            assert new.parameters == pb.NextTokenChooserParameters(**sampling)
            assert later == pb.Request(id=8, start=4, end=6, last=True)


async def test_a_step_without_running_requests_has_no_cached_batch(place: Path) -> None:
    async with over(place, size=1) as (group, ranks):
        chunk = Chunk(9, 0, 3, True, first())
        await group.run(ForwardStep(1, (), np.empty(0, np.int32), (chunk,)))
        asked = ranks[0].asked[0]
        assert not asked.batch.requests[0].parameters.do_sample and not asked.HasField("cached_batch")


async def test_a_decode_step_is_answered_by_the_first_rank(place: Path) -> None:
    async with over(place) as (group, ranks):
        answer = await group.run(ForwardStep(6, (9, 2**40), np.array([70, 80], np.int32), ()))
        assert answer is not None
        assert (answer.number, answer.request_ids, answer.token_ids) == (6, [9, 2**40], [17, 18])
        assert (answer.logprobs, answer.top_counts) == ([-0.5, -1.5], [0, 2])
        assert (answer.top_ids, answer.top_logprobs) == ([0, 1], [0.0, -1.0])
        assert (answer.forward_ns, answer.total_ns, answer.gap_ns) == (10, 20, 6)
        assert answer.successor_queued and answer.failures == {9: "too complex"} and answer.complete_ids == [2**40]
        for rank in ranks:
            (asked,) = rank.asked
            assert (asked.epoch, asked.step) == (EPOCH, 6)
            assert list(asked.batches) == [pb.CachedBatch(id=BATCH_ID, request_ids=[9, 2**40], size=2)]
            assert np.frombuffer(asked.slots, "<i4").tolist() == [70, 80]


async def test_log_probabilities_of_prompts_are_asked_for_and_read_request_by_request(place: Path) -> None:
    async with over(place) as (group, ranks):
        plain, own, best = first(), replace(first(), prompt_logprobs=0), replace(first(), prompt_logprobs=2)
        chunks = [Chunk(i, 0, 2, False, about) for i, about in ((7, plain), (8, own), (2**40, best))]
        step = ForwardStep(5, (), np.empty(0, np.int32), (*chunks, Chunk(2**40, 2, 3, False, None)))
        ranks[0].prompts = {
            "prompt_request_ids": np.array([8, 2**40], "<u8").tobytes(),
            "prompt_counts": np.array([1, 2], "<u4").tobytes(),
            "prompt_logprobs": np.array([-0.5, -1.5, -2.5], "<f4").tobytes(),
            "prompt_top_counts": np.array([0, 2], "<u4").tobytes(),
            "prompt_top_ids": np.arange(4, dtype="<i4").tobytes(),
            "prompt_top_logprobs": np.arange(-1, -5, -1, dtype="<f4").tobytes(),
        }
        answer = await group.run(step)
        requests = ranks[0].asked[0].batch.requests
        asked = [r.prompt_logprobs if r.HasField("prompt_logprobs") else None for r in requests]
        assert asked == [None, 0, 2, None]
        assert answer is not None and list(answer.prompt_logprobs) == [8, 2**40]
        lone, pair = answer.prompt_logprobs.values()
        assert (lone.logprobs_P.tolist(), pair.logprobs_P.tolist()) == ([-0.5], [-1.5, -2.5])
        assert lone.top_ids_PK.shape == (1, 0) and pair.top_ids_PK.tolist() == [[0, 1], [2, 3]]
        assert pair.top_logprobs_PK.tolist() == [[-1.0, -2.0], [-3.0, -4.0]]
        ranks[0].prompts = {}
        answer = await group.run(ForwardStep(6, (8,), np.array([70], np.int32), ()))
        assert answer is not None and not answer.prompt_logprobs


async def test_rows_leave_by_a_filter_or_with_their_batch_or_all_together(place: Path) -> None:
    async with over(place) as (group, ranks):
        for step in (FilterStep(1, (5, 6)), FilterStep(2, ()), ClearStep(3)):
            assert await group.run(step) is None
        for rank in ranks:
            assert rank.asked == [
                pb.FilterBatchRequest(batch_id=BATCH_ID, request_ids=[5, 6], epoch=EPOCH, step=1),
                pb.ClearCacheRequest(id=BATCH_ID, epoch=EPOCH, step=2),
                pb.ClearCacheRequest(epoch=EPOCH, step=3),
            ]
            assert rank.frames == (3 if place.name == "frames" else 0)


CODES = grpc.StatusCode
STEP_ENDS = {CODES.INTERNAL: StepFailedError, CODES.ABORTED: StepAbortedError, CODES.UNAVAILABLE: ShardsError}
WARMUP_ENDS = {
    CODES.RESOURCE_EXHAUSTED: WarmupRefusedError, CODES.INVALID_ARGUMENT: WarmupRefusedError,
    CODES.INTERNAL: ShardsError,
}  # fmt: skip


@pytest.mark.parametrize("refusing", [0, 1])
async def test_a_refusal_of_any_rank_raises_the_error_that_belongs_to_its_status(place: Path, refusing: int) -> None:
    async with over(place) as (group, ranks):
        warm_up = partial(group.warmup, 64, None, 16, None, None)
        for calls, ends in ((partial(group.run, ClearStep(1)), STEP_ENDS), (warm_up, WARMUP_ENDS)):
            for ranks[refusing].refusal, kind in ends.items():
                with pytest.raises(ShardsError, match=f"rank {refusing} does not want to") as refused:
                    await calls()
                assert type(refused.value) is kind
        assert not await group.is_healthy()


async def test_a_group_is_lost_once_and_for_the_first_reason(place: Path) -> None:
    async with over(place) as (group, _):
        group.lose("shard 1 was ended by signal 9")
        group.lose("the launcher has ended")
        assert await group.lost == "shard 1 was ended by signal 9"


async def test_a_health_check_is_false_when_the_group_is_closed_and_is_cancelled_when_its_task_is(place: Path) -> None:
    async with over(place) as (group, ranks):
        ranks[1].is_stuck = True
        cancelled, closed = (asyncio.create_task(group.is_healthy()) for _ in range(2))
        while len(ranks[1].asked) < 2:
            await asyncio.sleep(0.001)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await group.close()
        assert not await closed


async def test_an_answer_may_be_larger_than_grpcs_own_limit_of_4_megabytes(place: Path) -> None:
    async with over(place, size=1) as (group, ranks):
        ranks[0].tops = 1_200_000
        answer = await group.run(ForwardStep(6, (9, 2**40), np.array([70, 80], np.int32), ()))
        assert answer is not None and len(answer.top_ids) == ranks[0].tops


def lost_by(place: Path, data: bytes) -> list[str]:
    """The errors of two steps that a shard has not answered when it sends `data` and closes the connection, and of a
    step after that."""
    errors: list[str] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (await reader.readexactly(HEADER.size))[4] != 4:
            pass
        writer.write(data)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_unix_server(talk, place / "s")
        connection = await StepConnection.open(str(place / "s"), 10)
        assert connection is not None
        sent = [connection.send(kind, step, b"", lambda frame: frame.step) for kind, step in ((2, 1), (4, 2))]
        for answer in sent:
            try:
                errors.append(f"step {await answer}")
            except ShardsError as error:
                errors.append(str(error))
        with pytest.raises(ShardsError) as late:
            await connection.send(2, 3, b"", lambda frame: frame)
        errors.append(str(late.value))
        server.close()
        await server.wait_closed()

    asyncio.run(asyncio.wait_for(run(), 20))
    return errors


def test_steps_without_an_answer_end_with_their_connection_and_answers_before_it_count(tmp_path: Path) -> None:
    closed = f"the connection to {tmp_path}/s was closed"
    assert lost_by(tmp_path, pack(0, 1, b"")) == ["step 1", closed, closed]
    assert lost_by(tmp_path, pack(0, 2, b"")) == [closed, "step 2", closed]
    assert lost_by(tmp_path, pack(0, 9, b"")) == [closed, closed, closed]


def test_bytes_other_than_frames_end_the_connection(tmp_path: Path) -> None:
    assert all("the largest has" in error for error in lost_by(tmp_path, HEADER.pack(2**32 - 1, 0, 1)))


async def test_a_shard_that_listens_no_more_is_an_error_and_one_without_the_socket_is_not(tmp_path: Path) -> None:
    assert await StepConnection.open(str(tmp_path / "none"), 10) is None
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    with pytest.raises(ShardsError, match="could not connect to"):
        await StepConnection.open(str(tmp_path / "s"), 10)


async def test_the_first_rank_compiles_grammars_and_may_refuse_them(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with over(place) as (group, ranks):
        assert [await group.compile("good"), await group.compile("bad")] == ["", "too complex"]
        assert [[asked.grammar for asked in rank.asked] for rank in ranks] == [["good", "bad"], []]
        ranks[0].refusal = grpc.StatusCode.UNAVAILABLE
        with pytest.raises(ShardsError, match="does not want to"):
            await group.compile("good")
        ranks[0].refusal, ranks[0].is_stuck = None, True
        cut = asyncio.create_task(group.compile("slow"))
        while len(ranks[0].asked) < 4:
            await asyncio.sleep(0.001)
        await group.close()
        with pytest.raises(ShardsError, match="closed"):
            await cut
        for call in (group.compile("late"), group.views()):
            with pytest.raises(ShardsError, match="closed"):
                await call
        assert not await group.is_healthy()


async def test_all_ranks_read_and_load_an_adapter_and_any_may_refuse_it(place: Path) -> None:
    async with over(place) as (group, ranks):
        assert [await group.prepare_adapter("good"), await group.prepare_adapter("bad")] == ["", "gone"]
        for number, (digest, refusal) in enumerate((("good", ""), ("bad", "gone")), start=1):
            answer = await group.run(AdapterStep(number, 3, digest))
            assert answer is not None and answer.refusal == refusal
        for rank in ranks:
            loads = [(a.digest, a.slot, a.epoch, a.step) for a in rank.asked if isinstance(a, pb.LoadAdapterRequest)]
            assert loads == [("good", 3, EPOCH, 1), ("bad", 3, EPOCH, 2)]


async def test_a_rank_that_stands_still_says_nothing_of_a_grammar(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's next step with the request waits for the rank, as any other does."""
    async with over(place) as (group, ranks):
        monkeypatch.setattr(shards, "COMPILE_S", 0.05)
        ranks[0].is_stuck = True
        with pytest.raises(ShardsError):
            await group.compile("good")


async def test_a_missing_socket_for_steps_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with over(tmp_path):
        pass
    (line,) = [message for message in caplog.messages if "no socket for steps" in message]
    assert line.startswith(f"2 of 2 shards have no socket for steps, such as {tmp_path}/s-0.steps")
