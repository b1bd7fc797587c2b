"""The shard through its socket: the rules of proto/generate.proto."""

import asyncio
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from adapter_tools import sizes_of, write_adapter
from grammar_tools import byte_level_tokenizer, lark_grammar, regex_grammar
from shard_tools import make_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers

from text_generation_common.adapters.content import digest_of
from text_generation_common.errors import NOT_COMPILED
from text_generation_common.flags.kinds import Dtype
from text_generation_common.flags.model import AdapterFlags, ComputeFlags
from text_generation_common.frames import HEADER, Frame, FrameReader, pack
from text_generation_proto import generate_pb2 as pb
from text_generation_proto import generate_pb2_grpc as pb_grpc
from text_generation_server import server as server_module
from text_generation_server.config import ShardConfig
from text_generation_server.grammars.compiler import NO_TOKENIZER, EarlyGrammar, OwnTime
from text_generation_server.grammars.rows import CompilePatience
from text_generation_server.load import load_shard
from text_generation_server.server import SWITCH_S, Servicer, _share_interpreter, listen
from text_generation_server.step_requests import StepRequests
from text_generation_server.step_socket import MAX_CONNECTIONS, StepSocket
from text_generation_server.worker import Worker

PROMPT = np.array([5, 6, 7, 8], dtype="<i4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "fox": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


class Refused(Exception):
    """The answer to a frame that is an error."""


class FrameStub:
    """A stub whose steps are frames on the shard's socket for steps. Its other calls are gRPC calls."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def connect(self, path: Path) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(path)
        self._task = asyncio.create_task(self._read())

    async def close(self) -> None:
        self._writer.close()
        await self._task

    async def _read(self) -> None:
        frames = FrameReader()
        while data := await self._reader.read(100):
            for frame in frames.feed(data):
                self._answers.pop(frame.step).set_result(frame)

    def __getattr__(self, name: str) -> Any:
        kinds = ("Prefill", "Decode", "FilterBatch", "ClearCache", "LoadAdapter")
        if name not in kinds:
            return getattr(self._stub, name)
        return lambda request: self._step(kinds.index(name) + 1, request, getattr(pb, f"{name}Response"))

    async def _step(self, kind: int, request: Any, response: Any) -> Any:
        answer = self._answers[request.step] = asyncio.get_running_loop().create_future()
        self._writer.write(pack(kind, request.step, request.SerializeToString()))
        frame = await answer
        if frame.kind:
            (code,) = [code for code in grpc.StatusCode if code.value[0] == frame.kind]
            raise Refused(code, frame.message.decode())
        return response.FromString(frame.message)


@pytest.fixture(params=["frames", "calls"])
def way(request: pytest.FixtureRequest) -> str:
    """How steps are sent to the shard."""
    return str(request.param)


def with_shard(
    model: Path, folder: Path, use: Callable[[Any], Awaitable[None]], way: str = "calls", **settings: Any
) -> None:
    """Runs `use(stub)` against a shard of epoch 4 on its own sockets."""
    config = ShardConfig(
        model_path=model, uds_path=str(folder / "s"), rank=0, world_size=1, epoch=4, max_total_tokens=256,
        compute=ComputeFlags(dtype=Dtype.float32), **settings,
    )  # fmt: skip

    async def run() -> None:
        worker = Worker(config.epoch)
        servicer = Servicer([f"unix://{folder}/s-0"], worker)
        server = await listen(config, servicer)
        servicer.serve(await asyncio.wrap_future(worker.run_outside(lambda: load_shard(config, worker))))
        try:
            async with grpc.aio.insecure_channel(f"unix://{folder}/s-0") as channel:
                stub: Any = pb_grpc.TextGenerationServiceStub(channel)
                if way == "frames":
                    stub = FrameStub(stub)
                    await stub.connect(folder / "s-0.steps")
                stub.worker = worker
                await asyncio.wait_for(use(stub), timeout=60)
                if way == "frames":
                    await stub.close()
        finally:
            await server.stop(grace=None)
            worker.stop()

    asyncio.run(run())


def warmup() -> Any:
    return pb.WarmupRequest(max_prefill_tokens=64, max_concurrent_requests=4, epoch=4)


def prefill(step: int, request_id: int = 9, **changes: Any) -> Any:
    slots = np.arange(4, dtype="<i4") + 10 * request_id
    parameters = pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1, repetition_penalty=1, seed=2**63)
    request = pb.Request(
        id=request_id,
        parameters=parameters,
        top_n_tokens=2,
        end=4,
        last=True,
        ids=PROMPT.tobytes(),
        slots=slots.tobytes(),
        prompt_length=4,
    )
    batch = pb.Batch(id=1, requests=[request], size=1)
    return pb.PrefillRequest(**{"batch": batch, "epoch": 4, "step": step, **changes})


def decode(step: int, *request_ids: int, slot: int = 200) -> Any:
    slots = np.arange(slot, slot + len(request_ids), dtype="<i4").tobytes()
    batch = pb.CachedBatch(id=1, request_ids=request_ids)
    return pb.DecodeRequest(batches=[batch], epoch=4, step=step, slots=slots)


async def refusal(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    except Refused as error:
        return error.args
    pytest.fail("the shard has not refused this")


def test_a_request_goes_from_warmup_to_its_end(model: Path, tmp_path: Path, way: str) -> None:
    async def use(stub: Any) -> None:
        info = await stub.Info(pb.InfoRequest())
        assert (info.dtype, info.device_type, info.vocab_size) == ("torch.float32", "cpu", 320)
        assert list(info.eos_token_ids) == [2] and info.epoch == 4 and not info.requires_padding
        found = await stub.ServiceDiscovery(pb.ServiceDiscoveryRequest())
        assert list(found.urls) == [f"unix://{tmp_path}/s-0"]
        capacity = await stub.Warmup(warmup())
        assert (capacity.max_supported_total_tokens, capacity.max_total_tokens) == (4 * 256, 256)
        first = await stub.Prefill(prefill(1))
        assert np.frombuffer(first.result.request_ids, "<u8").tolist() == [9]
        (token,) = np.frombuffer(first.result.token_ids, "<i4")
        assert np.frombuffer(first.result.top_counts, "<u4").tolist() == [2]
        assert np.frombuffer(first.result.top_ids, "<i4")[0] == token
        assert first.result.step == 1 and first.forward_ns > 0 and first.batch.request_ids == [9]
        second = await stub.Decode(decode(2, 9))
        assert len(second.result.token_ids) == 4 and second.result.epoch == 4
        await stub.ClearCache(pb.ClearCacheRequest(id=1, epoch=4, step=3))
        health = await stub.Health(pb.HealthRequest())
        assert (health.epoch, health.phase, health.last_step) == (4, "ready", 3) and health.progress > 0

    with_shard(model, tmp_path, use, way)


def test_the_log_probabilities_of_a_prompt_are_packed_request_after_request(
    model: Path, tmp_path: Path, way: str
) -> None:
    async def use(stub: Any) -> None:
        await stub.Warmup(warmup())
        asked = prefill(1)
        (first,) = asked.batch.requests
        first.prompt_logprobs = 0
        other = asked.batch.requests.add()
        other.CopyFrom(first)
        other.id, other.prompt_logprobs, other.slots = 10, 3, np.arange(20, 24, dtype="<i4").tobytes()
        result = (await stub.Prefill(asked)).result
        assert np.frombuffer(result.prompt_request_ids, "<u8").tolist() == [9, 10]
        assert np.frombuffer(result.prompt_counts, "<u4").tolist() == [3, 3]
        assert np.frombuffer(result.prompt_top_counts, "<u4").tolist() == [0, 3]
        logprobs = np.frombuffer(result.prompt_logprobs, "<f4")
        assert (logprobs < 0).all() and logprobs[:3].tolist() == logprobs[3:].tolist()
        tops = np.frombuffer(result.prompt_top_logprobs, "<f4").reshape(3, 3)
        assert (tops[:, 0] >= logprobs[3:]).all() and (np.diff(tops) <= 0).all()
        assert np.frombuffer(result.prompt_top_ids, "<i4").shape == (9,)
        later = (await stub.Decode(decode(2, 9, 10))).result
        assert not (later.prompt_request_ids or later.prompt_counts or later.prompt_logprobs)

    with_shard(model, tmp_path, use, way)


def test_calls_that_overtake_each_other_run_in_the_order_of_their_numbers(
    model: Path, tmp_path: Path, way: str
) -> None:
    async def use(stub: Any) -> None:
        await stub.Warmup(warmup())
        late = [asyncio.ensure_future(stub.Decode(decode(step, 9, slot=200 + step))) for step in (4, 3, 2)]
        while len(stub.worker._held) < len(late):
            await asyncio.sleep(0.001)
        await stub.Prefill(prefill(1))
        answers = await asyncio.gather(*late)
        assert sorted(answer.result.step for answer in answers) == [2, 3, 4]
        assert any(answer.result.successor_queued for answer in answers)

    with_shard(model, tmp_path, use, way)


def test_a_failed_step_says_so_and_the_shard_goes_on_after_a_clear(model: Path, tmp_path: Path, way: str) -> None:
    async def use(stub: Any) -> None:
        await stub.Warmup(warmup())
        await stub.Prefill(prefill(1))
        code, reason = await refusal(stub.Decode(decode(2, 9, 77)))
        assert code == grpc.StatusCode.INTERNAL and "step 2" in reason
        code, _ = await refusal(stub.Decode(decode(3, 9)))
        assert code == grpc.StatusCode.ABORTED
        await stub.ClearCache(pb.ClearCacheRequest(epoch=4, step=4))
        await stub.Prefill(prefill(5))

    with_shard(model, tmp_path, use, way)


def test_adapters_are_read_beside_the_steps_and_loaded_by_a_step(model: Path, tmp_path: Path, way: str) -> None:
    listed = [write_adapter(tmp_path / name, sizes_of(model), 4, seed=seed) for seed, name in enumerate("ab")]
    first, other = (digest_of(Path(adapter.path)) for adapter in listed)

    async def use(stub: Any) -> None:
        await stub.Warmup(warmup())
        info = await stub.Info(pb.InfoRequest())
        assert (list(info.adapters), info.adapter_slots, info.adapters_in_host) == ([first, other], 1, 2)
        assert (await stub.PrepareAdapter(pb.PrepareAdapterRequest(digest=other))).refusal == ""
        assert (await stub.PrepareAdapter(pb.PrepareAdapterRequest(digest="x"))).refusal
        request = prefill(1)
        request.batch.requests[0].adapter = other
        assert "this shard has no adapter" in (await refusal(stub.Prefill(request)))[1]
        await stub.ClearCache(pb.ClearCacheRequest(epoch=4, step=2))
        assert (await stub.LoadAdapter(pb.LoadAdapterRequest(digest=other, slot=0, epoch=4, step=3))).refusal == ""
        request.step = 4
        assert len((await stub.Prefill(request)).result.token_ids) == 4

    flags = AdapterFlags(lora_adapters=",".join(map(str, listed)), max_loras=1, max_cpu_loras=2)
    with_shard(model, tmp_path, use, way, adapters=flags)


def test_an_adapter_that_comes_later_is_read_from_its_folder(model: Path, tmp_path: Path, way: str) -> None:
    adapter = write_adapter(tmp_path / "allowed/a", sizes_of(model), 4)
    digest = digest_of(Path(adapter.path))

    async def use(stub: Any) -> None:
        await stub.Warmup(warmup())
        info = await stub.Info(pb.InfoRequest())
        assert (list(info.adapters), info.adapter_slots, info.takes_adapters) == ([], 2, True)
        assert "does not know" in (await stub.PrepareAdapter(pb.PrepareAdapterRequest(digest=digest))).refusal
        asked = pb.PrepareAdapterRequest(digest=digest, folder=adapter.path)
        assert (await stub.PrepareAdapter(asked)).refusal == ""
        assert (await stub.LoadAdapter(pb.LoadAdapterRequest(digest=digest, slot=1, epoch=4, step=1))).refusal == ""
        request = prefill(2)
        request.batch.requests[0].adapter = digest
        assert len((await stub.Prefill(request)).result.token_ids) == 4

    flags = AdapterFlags(lora_dirs=str(tmp_path / "allowed"), max_loras=2, max_lora_rank=8)
    with_shard(model, tmp_path, use, way, adapters=flags)


def test_stale_steps_and_other_epochs_are_refused(model: Path, tmp_path: Path, way: str) -> None:
    async def use(stub: Any) -> None:
        code, _ = await refusal(stub.Warmup(pb.WarmupRequest(max_prefill_tokens=64, epoch=3)))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        await stub.Warmup(warmup())
        await stub.Prefill(prefill(1))
        for stale in (prefill(1, 10), prefill(2, 10, epoch=3)):
            code, _ = await refusal(stub.Prefill(stale))
            assert code == grpc.StatusCode.FAILED_PRECONDITION
        await stub.Decode(decode(2, 9))

    with_shard(model, tmp_path, use, way)


def test_filters_keep_the_requests_they_name(model: Path, tmp_path: Path, way: str) -> None:
    async def use(stub: Any) -> None:
        await stub.Warmup(warmup())
        await stub.Prefill(prefill(1, 9))
        joined = await stub.Prefill(
            prefill(2, 10, cached_batch=pb.CachedBatch(id=1, request_ids=[9]), slots=np.array([201], "<i4").tobytes())
        )
        assert np.frombuffer(joined.result.request_ids, "<u8").tolist() == [9, 10]
        kept = await stub.FilterBatch(pb.FilterBatchRequest(batch_id=1, request_ids=[10], epoch=4, step=3))
        assert list(kept.batch.request_ids) == [10]
        code, _ = await refusal(stub.Decode(decode(4, 9)))
        assert code == grpc.StatusCode.INTERNAL

    with_shard(model, tmp_path, use, way)


def test_too_little_memory_is_an_error_that_names_the_flag(model: Path, tmp_path: Path) -> None:
    async def use(stub: Any) -> None:
        request = warmup()
        request.max_batch_total_tokens = 2**31
        code, reason = await refusal(stub.Warmup(request))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "--max-batch-total-tokens" in reason

    with_shard(model, tmp_path, use)


def test_the_sockets_are_the_owners_alone_and_tokens_counts(model: Path, tmp_path: Path) -> None:
    async def use(stub: Any) -> None:
        for name in ("s-0", "s-0.steps"):
            mode = (tmp_path / name).stat().st_mode
            assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) & 0o077 == 0
        assert (await stub.Tokens(pb.TokensRequest(text="a fox a"))).ntokens == 3

    with_shard(model, tmp_path, use)


@pytest.mark.parametrize(
    "data", [HEADER.pack(2**32 - 1, 2, 1), pack(255, 1, b""), pack(2, 1, b"\xff\xff")], ids=["size", "kind", "message"]
)
def test_a_connection_that_sends_no_frames_of_steps_ends_and_the_others_go_on(
    model: Path, tmp_path: Path, data: bytes
) -> None:
    async def use(stub: Any) -> None:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s-0.steps")
        writer.write(data)
        assert await reader.read() == b""
        writer.close()
        await stub.Warmup(warmup())
        await stub.Prefill(prefill(1))

    with_shard(model, tmp_path, use, "frames")


def test_a_step_whose_client_has_gone_runs_and_the_next_client_goes_on(model: Path, tmp_path: Path) -> None:
    async def use(stub: Any) -> None:
        await stub.Warmup(warmup())
        _, writer = await asyncio.open_unix_connection(tmp_path / "s-0.steps")
        writer.write(pack(1, 1, prefill(1).SerializeToString()))
        writer.close()
        second = await stub.Decode(decode(2, 9))
        assert np.frombuffer(second.result.request_ids, "<u8").tolist() == [9]

    with_shard(model, tmp_path, use, "frames")


def test_a_router_finds_out_when_all_is_done_that_one_before_has_sent_and_then_what_is_computed(
    model: Path, tmp_path: Path
) -> None:
    async def use(stub: Any) -> None:
        async def until(pending: int, step_clients: int) -> pb.HealthResponse:
            while ((now := await stub.Health(pb.HealthRequest())).pending, now.step_clients) != (pending, step_clients):
                await asyncio.sleep(0.001)
            return now

        await stub.Warmup(warmup())
        assert (await until(0, 0)).last_step == 0
        _, writer = await asyncio.open_unix_connection(tmp_path / "s-0.steps")
        sent = prefill(1)
        sent.batch.requests[0].note = b"whose"
        for message in (decode(3, 9, slot=201), decode(2, 9)):
            writer.write(pack(2, message.step, message.SerializeToString()))
        await until(2, 1)
        writer.write(pack(1, 1, sent.SerializeToString()))
        writer.close()
        assert (await until(0, 0)).last_step == 3
        [row] = (await stub.Warmup(warmup())).computed
        ids, slots = (np.frombuffer(part, "<i4").tolist() for part in (row.ids, row.slots))
        assert row.note == b"whose" and ids[:4] == PROMPT.tolist() and len(ids) == 6
        assert slots == [90, 91, 92, 93, 200, 201]
        assert not (await stub.Warmup(warmup())).computed

    with_shard(model, tmp_path, use)


def test_no_more_connections_for_steps_than_the_limit(model: Path, tmp_path: Path) -> None:
    def ends(client: socket.socket) -> bool:
        """Whether the shard ends the connection, or answers a step on it."""
        with suppress(ConnectionError):
            client.sendall(pack(1, 1, prefill(1).SerializeToString()))
            return not client.recv(HEADER.size)
        return True

    def fill() -> None:
        with ExitStack() as clients:
            for _ in range(MAX_CONNECTIONS):
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.connect(str(tmp_path / "s-0.steps"))
            assert ends(client)  # the stub has a connection too
        while True:  # the shard notices a little later that the connections are closed
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(tmp_path / "s-0.steps"))
                if not ends(client):
                    return

    async def use(stub: Any) -> None:
        await stub.Warmup(warmup())
        await asyncio.to_thread(fill)

    with_shard(model, tmp_path, use, "frames")


def test_a_connection_that_cannot_be_accepted_at_once_is_accepted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        loop, taken = asyncio.get_running_loop(), asyncio.Event()
        accept, failures = loop.sock_accept, [OSError(errno.EMFILE, "Too many open files")]

        async def fail_once(listener: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return await accept(listener)

        def note() -> None:
            loop.call_soon_threadsafe(taken.set)

        monkeypatch.setattr(loop, "sock_accept", fail_once)
        steps = StepSocket(str(tmp_path / "s"), lambda *_: note())
        _, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(pack(2, 1, b""))
        await asyncio.wait_for(taken.wait(), timeout=20)
        writer.close()
        steps.close()

    asyncio.run(use())


def test_steps_before_the_weights_are_loaded_are_refused_as_unavailable(tmp_path: Path) -> None:
    worker, sent = Worker(epoch=4), []
    steps = StepRequests(worker)
    try:
        steps.take(Frame(2, 1, decode(1, 9).SerializeToString()), sent.append)
        (frame,) = FrameReader().feed(sent[0])
        assert frame == (grpc.StatusCode.UNAVAILABLE.value[0], 1, b"the shard is loading its weights")
    finally:
        worker.stop()


NEVER_CLOSES = """
import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
import torch
from text_generation_server import server
from text_generation_server.config import ShardConfig
logging.basicConfig(level="INFO")
server.CLOSE_S = 0.2
never = threading.Event().wait
shard = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, kernels="", close=never)
server.load_shard = lambda config, worker: shard
server.serve(ShardConfig(model_path=Path(), uds_path=sys.argv[1], rank=0, world_size=1, epoch=1))
"""


def test_a_shard_ends_although_its_group_does_not_close(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NEVER_CLOSES, str(tmp_path / "s")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as shard:
        try:
            assert shard.stderr is not None
            while "Server started" not in (line := shard.stderr.readline()):
                assert line, "the shard ended"
            assert sorted(os.listdir(tmp_path)) == ["s-0", "s-0.steps"]
            shard.send_signal(signal.SIGTERM)
            assert shard.wait(20) == 0
            assert "did not close within" in shard.stderr.read() and not os.listdir(tmp_path)
        finally:
            shard.kill()


@pytest.mark.parametrize(("device", "interval"), [("cuda", SWITCH_S), ("cpu", 0.005)])
def test_threads_of_a_gpu_s_shard_wait_less_for_the_interpreter(device: str, interval: float) -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        _share_interpreter(torch.device(device))
        assert sys.getswitchinterval() == pytest.approx(interval)
    finally:
        sys.setswitchinterval(before)


UNUSABLE = "grammars are not supported for this model's tokenizer.json: "


@pytest.mark.parametrize(
    ("words", "is_off", "refused"), [(False, False, ""), (True, False, UNUSABLE), (False, True, NO_TOKENIZER)]
)
def test_a_shard_says_whether_it_serves_grammars_and_compiles_them(
    model: Path, tmp_path: Path, words: bool, is_off: bool, refused: str
) -> None:
    """`words`: the tokenizer has no tokens for single bytes. `is_off`: --disable-grammar-support."""
    served = tmp_path / "model"
    shutil.copytree(model, served)
    if not words:
        byte_level_tokenizer().save(str(served / "tokenizer.json"))

    async def use(stub: Any) -> None:
        info = await stub.Info(pb.InfoRequest())
        asked = [regex_grammar("a+"), lark_grammar("start: unknown_rule")]
        good, bad = [(await stub.CompileGrammar(pb.CompileGrammarRequest(grammar=g))).refusal for g in asked]
        assert info.grammar_refusal == good
        assert good.startswith(refused) and bool(good) == bool(refused)
        assert bad == good or bad.startswith(NOT_COMPILED)

    with_shard(served, tmp_path, use, disable_grammar_support=is_off)


class SetTime(OwnTime):
    """A time of the compiler that a test sets."""

    set_s = 0.0

    @property
    def seconds(self) -> float:
        return self.set_s


def test_a_grammar_is_refused_for_the_compilers_own_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "COMPILE_LOOK_S", 0.001)

    async def run() -> None:
        for own_s, is_made, refusal in ((0.0, True, ""), (0.9, True, ""), (1.1, False, server_module.TOO_SLOW)):
            early = EarlyGrammar(Future(), SetTime())
            asked = asyncio.create_task(server_module.early_refusal(early))
            await asyncio.sleep(0.05)  # many looks
            assert not asked.done(), "the shard was stopped, as far as it can tell"
            early.time.set_s = own_s  # type: ignore[attr-defined]
            if is_made:
                await asyncio.sleep(0.01)
                early.work.set_result(None)  # type: ignore[arg-type]
            assert await asked == refusal

    asyncio.run(run())


def test_a_step_waits_for_a_grammar_in_slices_whatever_the_clock_says() -> None:
    class Late(Future[Any]):
        """Ready after some waits, each of which may have lasted while the process was stopped."""

        waits = 0

        def result(self, timeout: float | None = None) -> Any:
            self.waits += 1
            if self.waits < 20:
                raise TimeoutError
            return "made"

    assert CompilePatience(1.0).result(Late()) == "made"
    with pytest.raises(TimeoutError):
        CompilePatience(0.5).result(Late())
