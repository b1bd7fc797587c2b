"""Tests the calls that the shards get, the settings that are refused, and a whole benchmark of a real shard on the demo
model."""

import asyncio
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

import text_generation_server
from text_generation_benchmark.cli import app
from text_generation_benchmark.shards.config import Plan, make_plan
from text_generation_benchmark.shards.rounds import open_benchmark, prompt_ids
from text_generation_benchmark.shards.tables import Round
from text_generation_common.flags.kinds import Dtype
from text_generation_common.flags.model import ComputeFlags
from text_generation_common.sampling import Sampling
from text_generation_proto import generate_pb2 as pb
from text_generation_proto import generate_pb2_grpc as pb_grpc
from text_generation_router.errors import ShardsError, StartError
from text_generation_router.text.validation import AskedSampling
from text_generation_server.config import ShardConfig
from text_generation_server.load import load_shard
from text_generation_server.server import Servicer, listen
from text_generation_server.worker import Worker

DEMO_MODEL = Path(text_generation_server.__file__).parent / "demo_model"
PLAN = Plan(batch_sizes=(1, 3), sequence_length=5, decode_length=3, runs=2, warmups=1, sampling=Sampling())
IDS = (11, 12, 13, 14, 15)
ROUNDS = [(1, True), (1, False), (1, False), (3, True), (3, False), (3, False)]


@dataclass
class FakeShard(pb_grpc.TextGenerationServiceServicer):
    """Records the steps that it receives, and computes nothing."""

    urls: list[str]
    last_step: int = 7  # number of the last step that a router has run
    slots: int = 100
    epoch: int = 4
    refuse_from: int = 10**9  # number of the first step that is refused, as if another client had run it already
    moves_each_health: int = 0  # steps that another client runs between two calls of Health
    steps: list[Any] = field(default_factory=list)

    def ServiceDiscovery(self, request: Any, context: Any) -> Any:
        return pb.ServiceDiscoveryResponse(urls=self.urls)

    def Health(self, request: Any, context: Any) -> Any:
        self.last_step += self.moves_each_health
        return pb.HealthResponse(epoch=self.epoch, phase="ready", last_step=self.last_step)

    def Info(self, request: Any, context: Any) -> Any:
        return pb.InfoResponse(epoch=self.epoch, world_size=len(self.urls), vocab_size=20000, slots=self.slots)

    def ClearCache(self, request: Any, context: Any) -> Any:
        self._run(request, context)
        return pb.ClearCacheResponse()

    def Prefill(self, request: Any, context: Any) -> Any:
        return pb.PrefillResponse(result=self._run(request, context))

    def Decode(self, request: Any, context: Any) -> Any:
        return pb.DecodeResponse(result=self._run(request, context))

    def _run(self, request: Any, context: Any) -> Any:
        if request.step >= self.refuse_from:
            self.last_step = request.step
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"step {request.step} has been run already")
        assert (request.epoch, request.step) == (self.epoch, self.last_step + 1)
        self.last_step = request.step
        self.steps.append(request)
        return pb.StepResult(epoch=request.epoch, step=request.step)


@contextmanager
def fake_shards(folder: Path, count: int = 1, **state: Any) -> Iterator[list[FakeShard]]:
    """Fake shards that listen on <folder>/s-<rank>."""
    urls = [f"unix://{folder}/s-{rank}" for rank in range(count)]
    shards = [FakeShard(urls, **state) for _ in urls]
    with ExitStack() as stack:
        for shard, url in zip(shards, urls, strict=True):
            server = grpc.server(stack.enter_context(ThreadPoolExecutor(2)))
            pb_grpc.add_TextGenerationServiceServicer_to_server(shard, server)
            server.add_insecure_port(url)
            server.start()
            stack.callback(lambda server=server: server.stop(grace=None).wait())
        yield shards


async def measure(master: Path, plan: Plan = PLAN, ids: tuple[int, ...] = IDS) -> list[Round]:
    rounds: list[Round] = []
    async with open_benchmark(str(master), plan, ids) as benchmark:
        await benchmark.measure(rounds.append)
    return rounds


def int32(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def test_every_rank_gets_the_same_steps_in_the_sequence_that_the_router_began(tmp_path: Path) -> None:
    with fake_shards(tmp_path, 2) as (first, second):
        rounds = asyncio.run(measure(tmp_path / "s-0"))
    assert [(done.batch_size, done.is_warmup) for done in rounds] == ROUNDS
    assert first.steps == second.steps
    assert [step.step for step in first.steps] == list(range(8, 8 + 1 + 6 * 4))
    kinds = [type(step).__name__ for step in first.steps]
    one_round = ["PrefillRequest", "DecodeRequest", "DecodeRequest", "ClearCacheRequest"]
    assert kinds == ["ClearCacheRequest", *one_round * 6]
    assert not any(step.HasField("id") for step in first.steps if isinstance(step, pb.ClearCacheRequest))


def test_requests_are_equal_and_no_slot_is_used_twice(tmp_path: Path) -> None:
    with fake_shards(tmp_path) as (shard,):
        asyncio.run(measure(tmp_path / "s-0"))
    prefill, *decodes = shard.steps[-4:-1]
    requests = prefill.batch.requests
    assert [request.id for request in requests] == [0, 1, 2]
    for request in requests:
        assert int32(request.ids) == list(IDS) and (request.start, request.end, request.last) == (0, 5, True)
        assert request.prompt_length == 5 and not request.parameters.do_sample
    slots = [int32(request.slots) for request in requests] + [int32(decode.slots) for decode in decodes]
    assert sorted(itertools.chain(*slots)) == list(range(3 * 7))
    assert all(list(decode.batches[0].request_ids) == [0, 1, 2] for decode in decodes)


@pytest.mark.parametrize(
    ("state", "ids", "reason"),
    [
        ({"slots": 0}, IDS, "no warm-up.*start text-generation-launcher"),
        ({"slots": 20}, IDS, r"--batch-size 3 with 5 \+ 3 tokens each needs 21 token slots, and the shards have 20"),
        ({"moves_each_health": 1}, IDS, "busy: stop sending requests"),
        ({"refuse_from": 20}, IDS, "another client uses the shards .step 20 has been run already.: stop sending"),
        ({}, (1, 2, 3, 4, 20000), "--tokenizer-name is not the model"),
    ],
)
def test_shards_that_cannot_be_measured_are_refused(
    tmp_path: Path, state: dict[str, int], ids: tuple[int, ...], reason: str
) -> None:
    with fake_shards(tmp_path, **state), pytest.raises((ShardsError, StartError), match=reason):
        asyncio.run(measure(tmp_path / "s-0", ids=ids))


def test_where_no_shard_listens_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(ShardsError, match=r"there is no shard at .*s-0: start text-generation-launcher"):
        asyncio.run(measure(tmp_path / "s-0"))


def test_shards_that_go_away_are_not_taken_for_shards_that_another_client_uses(tmp_path: Path) -> None:
    async def run() -> None:
        with fake_shards(tmp_path) as (shard,):
            async with open_benchmark(str(tmp_path / "s-0"), PLAN, IDS) as benchmark:
                shard.refuse_from, shard.epoch = 8, 5
                with pytest.raises(ShardsError, match="the shards went away in step 8"):
                    await benchmark.measure(lambda done: None)

    asyncio.run(run())


def plan_of(decode_length: int = 8, **asked: Any) -> Plan:
    return make_plan((4, 1, 4), 10, decode_length, 10, 1, AskedSampling.of(asked))


def test_a_plan_has_each_batch_size_once_and_ignores_neutral_parameters() -> None:
    plan = plan_of(top_k=0, top_p=1.0, typical_p=1.0, temperature=1.0)
    assert plan.batch_sizes == (4, 1) and plan.decode_steps == 7 and plan.sampling == Sampling()
    assert plan_of(top_k=5).sampling.do_sample


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decode_length": 1}, "--decode-length must be at least 2"),
        ({"temperature": 0.0}, "`temperature` must be strictly positive"),
        ({"top_p": 1.5}, "`top_p` must be > 0.0 and < 1.0"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(StartError, match=reason):
        plan_of(**changes)


@pytest.mark.parametrize("length", [1, 10, 2000])
def test_a_prompt_has_the_tokens_asked_for(length: int) -> None:
    assert len(asyncio.run(prompt_ids(str(DEMO_MODEL), "main", length))) == length


def test_the_command_prints_progress_and_the_tables(tmp_path: Path) -> None:
    command = f"-t {DEMO_MODEL} -m {tmp_path}/s-0 -b 2 -s 6 -d 3 -r 2".split()
    with fake_shards(tmp_path):
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "batch size 2, round 1/3 (warm-up): prefill" in result.stderr
    assert "| Sequence Length    | 6 " in result.stdout and "| Decode (token) | " in result.stdout


def test_the_command_fails_with_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["-t", str(DEMO_MODEL), "-m", f"{tmp_path}/s-0"])
    assert result.exit_code == 1 and result.stderr.startswith("Error: there is no shard") and result.stdout == ""
    assert result.stderr.count("\n") == 1


def test_a_tokenizer_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZER_NAME", raising=False)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2 and "--tokenizer-name" in result.stderr


def test_a_real_shard_is_refused_before_its_warm_up_and_measured_after_it(tmp_path: Path) -> None:
    async def run() -> list[Round]:
        config = ShardConfig(
            model_path=DEMO_MODEL, uds_path=str(tmp_path / "s"), rank=0, world_size=1, epoch=4, max_total_tokens=64,
            compute=ComputeFlags(dtype=Dtype.float32),
        )  # fmt: skip
        worker = Worker(config.epoch)
        servicer = Servicer([f"unix://{tmp_path}/s-0"], worker)
        server = await listen(config, servicer)
        servicer.serve(await asyncio.wrap_future(worker.run_outside(lambda: load_shard(config, worker))))
        try:
            with pytest.raises(ShardsError, match="no warm-up"):
                await measure(tmp_path / "s-0")
            async with grpc.aio.insecure_channel(f"unix://{tmp_path}/s-0") as channel:
                stub = pb_grpc.TextGenerationServiceStub(channel)
                warmup = pb.WarmupRequest(max_prefill_tokens=64, max_concurrent_requests=4, epoch=4)
                capacity = await stub.Warmup(warmup)
                info = await stub.Info(pb.InfoRequest())
                assert info.slots == capacity.max_supported_total_tokens > 0
            rounds = await measure(tmp_path / "s-0")
            with pytest.raises(ShardsError, match=r"all rows are taken.*choose a smaller --batch-size"):
                await measure(tmp_path / "s-0", replace(PLAN, batch_sizes=(5,)))
            # the numbering of steps continues where the first benchmark ended
            assert await measure(tmp_path / "s-0") != rounds
            return rounds
        finally:
            await server.stop(grace=None)
            worker.stop()

    rounds = asyncio.run(asyncio.wait_for(run(), 120))
    assert [(done.batch_size, done.is_warmup) for done in rounds] == ROUNDS
    assert all(done.prefill_s > 0 and done.decode_s > 0 for done in rounds)
