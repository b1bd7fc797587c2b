"""The gRPC servicer of one shard, and the server that answers on its sockets. This file and `step_requests.py` are the
only ones of the shard that use protobuf.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Never, Protocol, TypeVar

import grpc
import torch

from text_generation_common.errors import TOO_COMPLEX, ShardError
from text_generation_common.grammars import COMPILER_STACK_BYTES
from text_generation_common.places import socket_path, steps_path
from text_generation_common.tasks import cancelled
from text_generation_proto import generate_pb2 as pb
from text_generation_proto import generate_pb2_grpc as pb_grpc
from text_generation_server.config import ShardConfig
from text_generation_server.errors import MatcherError, StepRefused
from text_generation_server.grammars.compiler import EarlyGrammar
from text_generation_server.load import Shard, load_shard
from text_generation_server.runner import Capacity, Measured
from text_generation_server.step.results import StepLog
from text_generation_server.step_requests import MAX_DETAILS, StepRequests, status
from text_generation_server.step_socket import StepSocket
from text_generation_server.worker import Worker

logger = logging.getLogger("text_generation_server")

MESSAGE_LIMIT = 64 * 2**20
# Seconds that device and group get to close. The launcher kills a shard 5 s after SIGTERM.
CLOSE_S = 3.0
# Processor time in seconds that the compiler may take for a grammar, and seconds between two looks at it. The time of a
# stopped shard, or of one whose processor others use, does not count.
COMPILE_S, COMPILE_LOOK_S = 1.0, 0.05
TOO_SLOW = f"{TOO_COMPLEX}: it was not compiled within {COMPILE_S:g} s of processor time"
# Seconds after which a thread gives the interpreter to a thread that waits for it, in a shard of a GPU.
SWITCH_S = 5e-4
Request = TypeVar("Request")
Response = TypeVar("Response")


class CallContext(Protocol):
    """The methods of gRPC's call context that the servicer uses."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> Never: ...


class Servicer(pb_grpc.TextGenerationServiceServicer):
    """Answers Health from the start, and all other calls once `shard` is loaded."""

    def __init__(
        self,
        urls: list[str],
        worker: Worker,
        step_log: StepLog | None = None,
        on_measured: Callable[[Measured], None] = lambda measured: None,
    ) -> None:
        self._urls = urls
        self._on_measured = on_measured
        self._worker = worker
        self.steps = StepRequests(worker, step_log)
        self.num_clients: Callable[[], int] = lambda: 0  # number of connections to the socket for steps
        self._slots = 0  # 0: no Warmup yet
        self._reader = ThreadPoolExecutor(1, "adapters")

    def serve(self, shard: Shard) -> None:
        self.steps.shard = shard
        self._worker.phase = "ready"

    async def _shard(self, context: CallContext) -> Shard:
        try:
            return self.steps.loaded()
        except ShardError as error:
            await context.abort(*status(error))

    async def Health(self, request: pb.HealthRequest, context: CallContext) -> pb.HealthResponse:
        worker, shard = self._worker, self.steps.shard
        return pb.HealthResponse(
            epoch=worker.epoch,
            phase=worker.phase,
            last_step=worker.last_step,
            progress=worker.progress,
            running_step=worker.running_step,
            longest_pause_ms=round(shard.runner.longest_pause_s * 1000) if shard else 0,
            pending=worker.num_pending,
            step_clients=self.num_clients(),
        )

    async def Info(self, request: pb.InfoRequest, context: CallContext) -> pb.InfoResponse:
        shard = await self._shard(context)
        return pb.InfoResponse(
            requires_padding=False,
            dtype=str(shard.dtype),
            device_type=shard.device.type,
            epoch=self._worker.epoch,
            world_size=len(self._urls),
            vocab_size=shard.model_config.vocab_size,
            max_positions=shard.model_config.max_positions,
            eos_token_ids=shard.model_config.eos_token_ids,
            kernels=shard.kernels,
            slots=self._slots,
            rows=shard.runner.num_rows,
            block_queries=shard.block_queries,
            queries_per_token=shard.queries_per_token,
            grammar_refusal=await _grammar_refusal(shard),
            adapters=shard.adapters.known,
            adapter_slots=shard.adapters.count,
            adapters_in_host=shard.adapters.in_host,
            takes_adapters=shard.adapters.takes_visitors,
        )

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: CallContext
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=self._urls)

    async def CompileGrammar(
        self, request: pb.CompileGrammarRequest, context: CallContext
    ) -> pb.CompileGrammarResponse:
        grammars = (await self._shard(context)).grammars
        return pb.CompileGrammarResponse(refusal=await early_refusal(grammars.compile_early(request.grammar)))

    async def Tokens(self, request: pb.TokensRequest, context: CallContext) -> pb.TokensResponse:
        tokenizer = (await self._shard(context)).tokenizer
        encodings = await asyncio.to_thread(tokenizer.encode_batch, [request.text])
        return pb.TokensResponse(ntokens=len(encodings[0].ids))

    async def Warmup(self, request: pb.WarmupRequest, context: CallContext) -> pb.WarmupResponse:
        shard = await self._shard(context)
        runner = shard.runner
        if request.epoch != self._worker.epoch:
            await context.abort(*status(StepRefused(f"epoch {request.epoch} is over")))

        def warmup() -> Capacity:
            with self._worker.during("warmup"):
                capacity = runner.warmup(
                    request.max_prefill_tokens,
                    request.max_total_tokens if request.HasField("max_total_tokens") else None,
                    request.max_concurrent_requests,
                    request.max_batch_total_tokens if request.HasField("max_batch_total_tokens") else None,
                    request.max_batch_size if request.HasField("max_batch_size") else None,
                    content=request.content,
                    known_content=request.known_content,
                )
            self._worker.when_idle(runner.take_piece, between=runner.kept is not None)
            if runner.measured is not None:
                self._on_measured(runner.measured)
            return capacity

        self._slots = 0
        try:
            capacity = await asyncio.wrap_future(self._worker.run_outside(warmup, restart_sequence=True))
        except ShardError as error:
            await context.abort(*status(error))
        self._slots = capacity.slots
        computed, runner.computed = runner.computed, []
        return pb.WarmupResponse(
            max_supported_total_tokens=capacity.slots,
            max_total_tokens=capacity.max_total_tokens,
            has_kept_cache=runner.has_kept_cache,
            adapters_in_slots=shard.adapters.in_slots,
            computed=[pb.ComputedRow(note=r.note, ids=r.ids.tobytes(), slots=r.slots.tobytes()) for r in computed],
        )

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: CallContext) -> pb.LoadAdapterResponse:
        return await self._step(self.steps.load_adapter, request, context)

    async def PrepareAdapter(
        self, request: pb.PrepareAdapterRequest, context: CallContext
    ) -> pb.PrepareAdapterResponse:
        adapters = (await self._shard(context)).adapters
        asked = request.digest, request.folder
        work = asyncio.get_running_loop().run_in_executor(self._reader, adapters.prepare, *asked)
        return pb.PrepareAdapterResponse(refusal=(await work)[:MAX_DETAILS])

    async def ClearCache(self, request: pb.ClearCacheRequest, context: CallContext) -> pb.ClearCacheResponse:
        return await self._step(self.steps.clear_cache, request, context)

    async def FilterBatch(self, request: pb.FilterBatchRequest, context: CallContext) -> pb.FilterBatchResponse:
        return await self._step(self.steps.filter_batch, request, context)

    async def Prefill(self, request: pb.PrefillRequest, context: CallContext) -> pb.PrefillResponse:
        return await self._step(self.steps.prefill, request, context)

    async def Decode(self, request: pb.DecodeRequest, context: CallContext) -> pb.DecodeResponse:
        return await self._step(self.steps.decode, request, context)

    async def _step(
        self, start: Callable[[Request], Future[Response]], request: Request, context: CallContext
    ) -> Response:
        try:
            return await asyncio.wrap_future(start(request))
        except ShardError as error:
            await context.abort(*status(error))


async def _grammar_refusal(shard: Shard) -> str:
    """Why every grammar is refused, once the tokenizer for grammars is read; "" if they are served."""
    return await _refusal(shard.grammars.prepare()) if shard.group.rank == 0 else ""


async def _refusal(work: "Future[Any]") -> str:
    """Waits for work on grammars. The work goes on if the call is cancelled."""
    try:
        await asyncio.shield(asyncio.wrap_future(work))
    except MatcherError as error:
        return str(error)
    return ""


async def early_refusal(early: EarlyGrammar) -> str:
    """Why no text can follow the grammar, or ""."""
    refusal = asyncio.create_task(_refusal(early.work))
    try:
        while not (await asyncio.wait([refusal], timeout=COMPILE_LOOK_S))[0]:
            if early.time.seconds > COMPILE_S:
                return TOO_SLOW
        return refusal.result()
    finally:
        await cancelled(refusal)


def serve(
    config: ShardConfig,
    load: Callable[[ShardConfig, Worker], Shard] | None = None,
    on_ready: Callable[[], None] = lambda: None,
    on_measured: Callable[[Measured], None] = lambda measured: None,
) -> None:
    """Serves a model on unix://<uds-path>-<rank> until SIGINT or SIGTERM. ShardError if the model cannot be served.
    `load`: instead of `load_shard`. `on_ready` is called when the model is served, and `on_measured` with what each
    Warmup has measured."""
    threading.stack_size(COMPILER_STACK_BYTES)  # size for all threads that start from now on
    asyncio.run(_serve(config, load or load_shard, on_ready, on_measured))


async def _serve(
    config: ShardConfig,
    load: Callable[[ShardConfig, Worker], Shard],
    on_ready: Callable[[], None],
    on_measured: Callable[[Measured], None],
) -> None:
    worker = Worker(config.epoch)
    step_log = StepLog(config.step_log) if config.step_log and config.rank == 0 else None
    urls = [f"unix://{socket_path(config.uds_path, rank)}" for rank in range(config.world_size)]
    servicer = Servicer(urls, worker, step_log, on_measured)
    stopping = asyncio.create_task(_signal())
    server = await listen(config, servicer)
    loading = asyncio.wrap_future(worker.run_outside(lambda: load(config, worker)))
    ends: list[asyncio.Future[Shard] | asyncio.Future[None]] = [loading, stopping]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            _remove_sockets(config)
            os._exit(0)  # the process exits at once, because loading cannot be interrupted
        shard = loading.result()
        _share_interpreter(shard.device)
        servicer.serve(shard)
        on_ready()
        what = f"{shard.device.type}, {str(shard.dtype).removeprefix('torch.')}, kernels: {shard.kernels}"
        logger.info("Server started at unix://%s-%d (%s)", config.uds_path, config.rank, what)
        await stopping
        closing = worker.run_outside(shard.close)
    finally:
        stopping.cancel()
        await server.stop(grace=0.5)
        has_ended = worker.stop(CLOSE_S)
        if step_log is not None:
            step_log.close()
        _remove_sockets(config)
    if not has_ended:
        logger.warning("the device or the group did not close within %.0f s: the process ends without it", CLOSE_S)
        logging.shutdown()
        os._exit(0)  # Python would wait for threads that wait for the device.
    if error := closing.exception():
        logger.warning("the device or the group did not close: %s", error)


def _share_interpreter(device: torch.device) -> None:
    """Shortens the GIL switch interval, 5 ms by default, where a GPU computes. Its worker thread spends milliseconds in
    Python to launch a step with prompts. The waiter thread and the event loop need the GIL in this time to deliver the
    tokens of the step before."""
    if device.type == "cuda":
        sys.setswitchinterval(SWITCH_S)


async def _signal() -> None:
    """Waits for SIGINT or SIGTERM."""
    received = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, received.set)
    await received.wait()


class ShardServer:
    """Answers on the shard's two sockets: gRPC, and frames for steps."""

    def __init__(self, calls: grpc.aio.Server, steps: StepSocket) -> None:
        self._calls = calls
        self._steps = steps

    async def stop(self, grace: float | None) -> None:
        self._steps.close()
        await self._calls.stop(grace=grace)


async def listen(config: ShardConfig, servicer: Servicer) -> ShardServer:
    """Starts to answer on the shard's sockets."""
    path = socket_path(config.uds_path, config.rank)
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", MESSAGE_LIMIT), ("grpc.max_send_message_length", MESSAGE_LIMIT)]
    )
    pb_grpc.add_TextGenerationServiceServicer_to_server(servicer, server)
    with _only_for_owner():
        steps = StepSocket(steps_path(path), servicer.steps.take)  # first: a client that finds `path` finds both
        servicer.num_clients = lambda: steps.num_open
        server.add_insecure_port(f"unix://{path}")
        await server.start()
    return ShardServer(server, steps)


def _remove_sockets(config: ShardConfig) -> None:
    path = socket_path(config.uds_path, config.rank)
    for file in (path, steps_path(path)):
        Path(file).unlink(missing_ok=True)


@contextlib.contextmanager
def _only_for_owner() -> Iterator[None]:
    """Inside this context, new sockets can be read and written by their owner only."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
