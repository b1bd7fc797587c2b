"""The client of a group of shards: every rank gets every call, and rank 0's tokens are used. Steps go as frames on the
shards' sockets for steps, everything else as gRPC calls. No other file of the router uses protobuf."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import grpc
import numpy as np

from text_generation_common import faults, sampling_wire
from text_generation_common.frames import Frame
from text_generation_common.places import steps_path
from text_generation_proto import generate_pb2 as pb
from text_generation_proto import generate_pb2_grpc as pb_grpc
from text_generation_router.engine.protocol import ModelInfo
from text_generation_router.engine.step_connection import StepConnection
from text_generation_router.errors import ShardsError, StepAbortedError, StepFailedError, WarmupRefusedError
from text_generation_router.scheduling.adapter_slots import AdapterRoom
from text_generation_router.scheduling.costs import QueryBlocks
from text_generation_router.scheduling.memory.computed import ComputedHistory
from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.scheduling.step import (
    BATCH_ID,
    NO_FAILURES,
    NO_PROMPTS,
    AdapterStep,
    Chunk,
    ClearStep,
    ForwardStep,
    Step,
    StepAnswer,
)

logger = logging.getLogger(__name__)

MESSAGE_LIMIT = 64 * 2**20
OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    # A new epoch's channel must not share a connection of the old epoch, which may wait up to 120 s for its next try.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]
# Time limits in seconds. Steps and warm-up have none: the launcher detects shards that hang.
CONNECT_S, CALL_S, HEALTH_S = 10.0, 10.0, 2.0
# Seconds without progress, at least, after which ranks that have not run the same steps never will; how many times the
# longest pause of a step these are for larger models; and seconds between two looks at the ranks.
SETTLE_S, SETTLE_PAUSES, LOOK_S = 1.0, 2, 0.005
# Seconds for a shard to compile a grammar. The shard refuses a grammar that takes the compiler too long, so only a
# shard that is stopped, or lost, takes longer.
COMPILE_S = 30.0

# Seconds for a shard to read an adapter, which may be behind others.
READ_S = 120.0

Stub = pb_grpc.TextGenerationServiceStub
R = TypeVar("R")
Errors = Mapping[grpc.StatusCode, type[ShardsError]]
STEP_ERRORS: Errors = {grpc.StatusCode.INTERNAL: StepFailedError, grpc.StatusCode.ABORTED: StepAbortedError}
CODES = {code.value[0]: code for code in grpc.StatusCode}
WARMUP_ERRORS: Errors = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: WarmupRefusedError,
    grpc.StatusCode.INVALID_ARGUMENT: WarmupRefusedError,
}


@dataclass(frozen=True, slots=True)
class WarmupAnswer:
    slots: int
    max_total_tokens: int
    has_kept_cache: bool = False  # whether the slots hold the content that was asked for
    adapters_in_slots: tuple[str, ...] = ()  # the adapter that each slot has on all ranks; "": none
    computed: tuple[ComputedHistory, ...] = ()  # what the slots hold of requests of an engine before this one


@dataclass(frozen=True, slots=True)
class ShardView:
    """Numbers of rows and token slots that one shard holds, by its own count."""

    rows: int
    slots: int


@dataclass(frozen=True, slots=True)
class StepKind:
    """How a step travels: the kind of its frame, or the gRPC call that does the same, and what the answer is."""

    number: int
    call: Callable[[Stub], Callable[[Any], Awaitable[Any]]]
    response: Any
    read: Callable[[Any], StepAnswer | None]


class ShardedClient:
    """A connection to the shards of one epoch, which owns its gRPC channels and the connections for steps.

    `lost` is done, with the reason, once the launcher has reported that the group is gone.
    """

    def __init__(
        self, channels: list[grpc.aio.Channel], info: ModelInfo, connections: Sequence[StepConnection] = ()
    ) -> None:
        """`connections`: one for each rank; none: the shards take steps as gRPC calls only."""
        self._channels = channels
        self._stubs = [Stub(channel) for channel in channels]
        self._connections = connections
        self.info = info
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def epoch(self) -> int:
        return self.info.epoch

    def lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    @classmethod
    async def connect(cls, master_uds_path: str, takes_over: bool = False) -> "ShardedClient":
        """Asks the first shard for the addresses of the others. ShardsError if the first shard cannot be reached.
        `takes_over`: whether a Warmup is to follow, before which no step of another client may be left."""
        master = _channel(f"unix://{master_uds_path}")
        try:
            stub = Stub(master)
            found = await stub.ServiceDiscovery(pb.ServiceDiscoveryRequest(), timeout=CONNECT_S, wait_for_ready=True)
            info = await stub.Info(pb.InfoRequest(), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            await master.close()
            raise ShardsError(
                f"Could not connect to Text Generation server: {master_uds_path}: {_reason(error)}"
            ) from None
        channels = [master, *(_channel(url) for url in found.urls[1:])]
        paths = [master_uds_path, *(url.removeprefix("unix://") for url in found.urls[1:])]
        connections: list[StepConnection] = []
        try:
            if takes_over:
                await _settled([Stub(channel) for channel in channels])
            for path in paths:
                if (connection := await StepConnection.open(steps_path(path), CONNECT_S)) is not None:
                    connections.append(connection)
        except ShardsError:
            await _close(channels, connections)
            raise
        if len(connections) < len(paths):
            logger.warning(
                "%d of %d shards have no socket for steps, such as %s: steps go as gRPC calls, which is slower. Was the"
                " folder cleaned? A new start of the shards makes the sockets again",
                len(paths) - len(connections),
                len(paths),
                steps_path(master_uds_path),
            )
            await _close([], connections)
            connections = []
        return cls(channels, _model_info(info), connections)

    async def warmup(
        self,
        max_prefill_tokens: int,
        max_total_tokens: int | None,
        requests: int,
        wanted_slots: int | None,
        max_rows: int | None,
        content: int = 0,
        known_content: int = 0,
    ) -> WarmupAnswer:
        """Makes each shard allocate its KV cache; the smallest size of all ranks counts. Step numbers start at 1 again.
        `content` names what the steps from now on write, `known_content` what the books of slots describe (0: nothing).
        WarmupRefusedError: the given limits do not fit. ShardsError: any other failure.
        """
        request = pb.WarmupRequest(
            max_prefill_tokens=max_prefill_tokens,
            max_total_tokens=max_total_tokens,
            max_concurrent_requests=requests,
            max_batch_total_tokens=wanted_slots,
            max_batch_size=max_rows,
            epoch=self.info.epoch,
            content=content,
            known_content=known_content,
        )
        answers = await self._call(lambda stub: stub.Warmup(request), WARMUP_ERRORS)
        return WarmupAnswer(
            min(answer.max_supported_total_tokens for answer in answers),
            min(answer.max_total_tokens for answer in answers),
            all(answer.has_kept_cache for answer in answers),
            tuple(
                slot[0] if len(set(slot)) == 1 else ""
                for slot in zip(*(answer.adapters_in_slots for answer in answers), strict=True)
            ),
            _computed(answers),
        )

    def run(self, step: Step) -> "asyncio.Future[StepAnswer | None]":
        """Sends a step; the future is done when all ranks have answered. StepFailedError: the step raised in a shard.
        StepAbortedError: the step was not run. ShardsError: any other failure; the group cannot be used any more."""
        faults.point("router.rpc")
        request = _step_request(step, self.info.epoch)
        kind = KINDS[type(request)]
        if not self._connections:
            return asyncio.ensure_future(self._run_as_call(kind, request))
        message, read = request.SerializeToString(), partial(_read, kind)
        if len(self._connections) == 1:
            return self._connections[0].send(kind.number, step.number, message, read)
        sent = [connection.send(kind.number, step.number, message, read) for connection in self._connections]
        return asyncio.ensure_future(_first(sent))

    async def _run_as_call(self, kind: StepKind, request: Any) -> StepAnswer | None:
        first, *_ = await self._call(lambda stub: kind.call(stub)(request))
        return kind.read(first)

    async def compile(self, grammar: str) -> str:
        """Has the first rank compile a grammar. Returns why no text can follow it, or "". ShardsError: the rank cannot
        be reached, or does not answer."""
        request = pb.CompileGrammarRequest(grammar=grammar)
        (answer,) = await self._call(lambda stub: stub.CompileGrammar(request, timeout=COMPILE_S), num_ranks=1)
        return str(answer.refusal)

    async def prepare_adapter(self, digest: str, folder: str = "") -> str:
        """Has all ranks read an adapter, for a step that is to load it. Returns why it cannot be loaded, or "".
        `folder`: where its files are, if the shards did not have it at their start. ShardsError: a rank cannot be
        reached, or does not answer."""
        request = pb.PrepareAdapterRequest(digest=digest, folder=folder)
        answers = await self._call(lambda stub: stub.PrepareAdapter(request, timeout=READ_S))
        return next((str(answer.refusal) for answer in answers if answer.refusal), "")

    async def views(self) -> list[ShardView]:
        """Each rank's numbers of rows and slots. ShardsError if a rank cannot be reached."""
        answers = await self._call(lambda stub: stub.Info(pb.InfoRequest(), timeout=CALL_S))
        return [ShardView(answer.rows, answer.slots) for answer in answers]

    async def is_healthy(self) -> bool:
        try:
            await self._call(lambda stub: stub.Health(pb.HealthRequest(), timeout=HEALTH_S))
        except ShardsError:
            return False
        return True

    async def close(self) -> None:
        await _close(self._channels, self._connections)

    async def _call(
        self, call: Callable[[Stub], Awaitable[R]], kinds: Errors = STEP_ERRORS, num_ranks: int | None = None
    ) -> list[R]:
        """Makes the same call on the first `num_ranks` ranks, or on all. `kinds` maps status codes to errors; other
        codes, and a connection that is closed before or during the call, raise ShardsError."""
        stubs = self._stubs[:num_ranks]
        try:
            if len(stubs) == 1:
                return [await call(stubs[0])]
            return list(await asyncio.gather(*(call(stub) for stub in stubs)))
        except grpc.aio.AioRpcError as error:
            raise kinds.get(error.code(), ShardsError)(_reason(error)) from None
        except (grpc.aio.UsageError, asyncio.CancelledError):
            if _is_cancelled():
                raise
            raise ShardsError("the connection is closed") from None


async def _settled(ranks: Sequence[Stub]) -> None:
    """Waits until all ranks have run the same steps, and all that an engine before this one has sent. ShardsError if
    they never will: a rank that got one step more than another waits for it in a collective. A rank alone needs no
    other, but is given up as well while a client's connection is open: a step of the dead engine may still come on it,
    with the number of a step of ours."""
    loop, health = asyncio.get_running_loop(), pb.HealthRequest()
    seen, seen_s = list[tuple[int, int]](), 0.0
    while True:
        try:
            found = await asyncio.gather(*(rank.Health(health, timeout=HEALTH_S) for rank in ranks))
        except grpc.aio.AioRpcError as error:
            raise ShardsError(_reason(error)) from None
        if not any(rank.pending or rank.step_clients for rank in found) and len({r.last_step for r in found}) == 1:
            return
        now = [(rank.last_step, rank.progress) for rank in found]
        if now != seen:
            seen, seen_s = now, loop.time()
        elif loop.time() - seen_s > max(SETTLE_S, SETTLE_PAUSES * max(rank.longest_pause_ms for rank in found) / 1000):
            if len(found) == 1 and not found[0].step_clients:
                return  # what it runs ends before a Warmup
            raise ShardsError("another webserver is connected, or has ended between the calls to its shards")
        await asyncio.sleep(LOOK_S)


def _is_cancelled() -> bool:
    """Whether the task that runs is being cancelled. If not, a channel was closed, which cancels its calls."""
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())


def _channel(url: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(url, options=OPTIONS)


async def _close(channels: Sequence[grpc.aio.Channel], connections: Sequence[StepConnection]) -> None:
    for connection in connections:
        connection.close()
    for channel in channels:
        await channel.close()


async def _first(answers: "list[asyncio.Future[StepAnswer | None]]") -> StepAnswer | None:
    """The first rank's answer, when all ranks have answered."""
    first, *_ = await asyncio.gather(*answers)
    return first


def _reason(error: grpc.aio.AioRpcError) -> str:
    return str(error.details() or error.code().name)


def _model_info(info: pb.InfoResponse) -> ModelInfo:
    return ModelInfo(
        dtype=info.dtype,
        device_type=info.device_type,
        vocab_size=info.vocab_size,
        max_positions=info.max_positions,
        eos_token_ids=tuple(info.eos_token_ids),
        kernels=info.kernels,
        world_size=info.world_size,
        epoch=info.epoch,
        query_blocks=QueryBlocks(info.block_queries or 1, info.queries_per_token or 1),
        grammar_refusal=info.grammar_refusal,
        adapters=frozenset(info.adapters),
        adapter_room=AdapterRoom(tuple(info.adapters), info.adapter_slots, info.adapters_in_host, info.takes_adapters),
    )


def _computed(answers: list[pb.WarmupResponse]) -> tuple[ComputedHistory, ...]:
    """What all ranks say. Nothing if they do not say the same."""
    first, *others = [answer.computed for answer in answers]
    return tuple(
        ComputedHistory(tuple(json.loads(row.note)), np.frombuffer(row.ids, "<i4"), np.frombuffer(row.slots, "<i4"))
        for row in (first if all(other == first for other in others) else ())
    )


def _step_request(step: Step, epoch: int) -> Any:
    if isinstance(step, ForwardStep):
        return _forward_request(step, epoch)
    if isinstance(step, ClearStep):
        return pb.ClearCacheRequest(epoch=epoch, step=step.number)
    if isinstance(step, AdapterStep):
        return pb.LoadAdapterRequest(digest=step.adapter, slot=step.slot, epoch=epoch, step=step.number)
    if step.keep:
        return pb.FilterBatchRequest(batch_id=BATCH_ID, request_ids=step.keep, epoch=epoch, step=step.number)
    return pb.ClearCacheRequest(id=BATCH_ID, epoch=epoch, step=step.number)


def _forward_request(step: ForwardStep, epoch: int) -> pb.PrefillRequest | pb.DecodeRequest:
    slots = step.decode_slots.tobytes()
    running = pb.CachedBatch(id=BATCH_ID, request_ids=step.decode_ids, size=len(step.decode_ids))
    if not step.chunks:
        return pb.DecodeRequest(batches=[running], epoch=epoch, step=step.number, slots=slots)
    batch = pb.Batch(id=BATCH_ID, requests=[_request(c) for c in step.chunks], size=len(step.chunks))
    prefill = pb.PrefillRequest(batch=batch, epoch=epoch, step=step.number, slots=slots)
    if step.decode_ids:
        prefill.cached_batch.CopyFrom(running)
    return prefill


def _request(chunk: Chunk) -> pb.Request:
    request = pb.Request(id=chunk.request_id, start=chunk.start, end=chunk.end, last=chunk.last)
    if chunk.first is None:
        return request
    request.ids = np.array(chunk.first.ids, dtype="<i4").tobytes()
    request.slots = chunk.first.slots.tobytes()
    request.prompt_length = chunk.first.prompt_length
    request.adapter = chunk.first.adapter
    if chunk.first.namespace is not None:
        request.note = json.dumps(chunk.first.namespace).encode()
    sampling_wire.to_pb(chunk.first.sampling, request)
    if chunk.first.prompt_logprobs is not None:
        request.prompt_logprobs = chunk.first.prompt_logprobs
    return request


def _read(kind: StepKind, frame: Frame) -> StepAnswer | None:
    """Reads the answer to a step, or raises the error that it is."""
    if frame.kind:
        code = CODES.get(frame.kind, grpc.StatusCode.UNKNOWN)
        raise STEP_ERRORS.get(code, ShardsError)(frame.message.decode(errors="replace") or code.name)
    return kind.read(kind.response.FromString(frame.message))


def _integers(packed: bytes, code: Literal["Q", "i", "I"]) -> list[int]:
    """The numbers of a packed array; `code` is their type, as in the module struct. They are little-endian, as are all
    processors that shards and routers run on."""
    return list(memoryview(packed).cast(code)) if packed else []


def _floats(packed: bytes) -> list[float]:
    return list(memoryview(packed).cast("f")) if packed else []


def _answer(response: pb.PrefillResponse | pb.DecodeResponse) -> StepAnswer:
    result = response.result
    return StepAnswer(
        number=result.step,
        request_ids=_integers(result.request_ids, "Q"),
        token_ids=_integers(result.token_ids, "i"),
        logprobs=_floats(result.logprobs),
        top_counts=_integers(result.top_counts, "I"),
        top_ids=_integers(result.top_ids, "i"),
        top_logprobs=_floats(result.top_logprobs),
        forward_ns=response.forward_ns,
        total_ns=response.total_ns,
        gap_ns=result.gap_ns,
        successor_queued=result.successor_queued,
        failures={failed.id: failed.reason for failed in result.failures} if result.failures else NO_FAILURES,
        prompt_logprobs=_prompt_logprobs(result) if result.prompt_request_ids else NO_PROMPTS,
        complete_ids=_integers(result.complete_ids, "Q"),
    )


def _prompt_logprobs(result: pb.StepResult) -> dict[int, PromptLogprobs]:
    logprobs, top_logprobs = (np.frombuffer(p, "<f4") for p in (result.prompt_logprobs, result.prompt_top_logprobs))
    top_ids = np.frombuffer(result.prompt_top_ids, "<i4")
    found: dict[int, PromptLogprobs] = {}
    first = first_top = 0
    counts = zip(_integers(result.prompt_counts, "I"), _integers(result.prompt_top_counts, "I"), strict=True)
    for request_id, (count, top_count) in zip(_integers(result.prompt_request_ids, "Q"), counts, strict=True):
        end, end_of_tops, shape = first + count, first_top + count * top_count, (count, top_count)
        found[request_id] = PromptLogprobs(
            logprobs[first:end],
            top_ids[first_top:end_of_tops].reshape(shape),
            top_logprobs[first_top:end_of_tops].reshape(shape),
        )
        first, first_top = end, end_of_tops
    return found


KINDS: Mapping[type, StepKind] = {
    pb.PrefillRequest: StepKind(1, lambda stub: stub.Prefill, pb.PrefillResponse, _answer),
    pb.DecodeRequest: StepKind(2, lambda stub: stub.Decode, pb.DecodeResponse, _answer),
    pb.FilterBatchRequest: StepKind(3, lambda stub: stub.FilterBatch, pb.FilterBatchResponse, lambda _: None),
    pb.ClearCacheRequest: StepKind(4, lambda stub: stub.ClearCache, pb.ClearCacheResponse, lambda _: None),
    pb.LoadAdapterRequest: StepKind(
        5, lambda stub: stub.LoadAdapter, pb.LoadAdapterResponse, lambda a: StepAnswer(0, refusal=a.refusal)
    ),
}
