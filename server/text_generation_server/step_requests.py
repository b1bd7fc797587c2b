"""Steps from protobuf to the worker and back."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import grpc
import numpy as np
import torch
from google.protobuf.message import DecodeError

from text_generation_common import frames, sampling_wire
from text_generation_common.errors import MemoryLimitError, ShardError
from text_generation_common.frames import Frame, FrameError
from text_generation_proto import generate_pb2 as pb
from text_generation_server.errors import ShardLoading, StepAborted, StepError, StepFailed, StepRefused
from text_generation_server.load import Shard
from text_generation_server.runner import ModelRunner
from text_generation_server.step.results import Pending, PromptOutput, StepLoad, StepLog, StepOutput, measure
from text_generation_server.step.rows import PromptChunk, StepBatch
from text_generation_server.worker import StepClock, Worker

MAX_DETAILS = 2000  # most characters of an error's text; gRPC replaces an answer of more than 16 KiB by another error
STATUS: dict[type[BaseException], grpc.StatusCode] = {
    ShardLoading: grpc.StatusCode.UNAVAILABLE,
    StepRefused: grpc.StatusCode.FAILED_PRECONDITION,
    StepAborted: grpc.StatusCode.ABORTED,
    StepFailed: grpc.StatusCode.INTERNAL,
    MemoryLimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StepError: grpc.StatusCode.INVALID_ARGUMENT,
}

StepRequest = (
    pb.PrefillRequest | pb.DecodeRequest | pb.FilterBatchRequest | pb.ClearCacheRequest | pb.LoadAdapterRequest
)
ForwardRequest = pb.PrefillRequest | pb.DecodeRequest
ForwardResponse = TypeVar("ForwardResponse", pb.PrefillResponse, pb.DecodeResponse)
# Types of the messages on the socket for steps, by the kind of their frame.
KINDS: dict[int, type[StepRequest]] = {
    1: pb.PrefillRequest,
    2: pb.DecodeRequest,
    3: pb.FilterBatchRequest,
    4: pb.ClearCacheRequest,
    5: pb.LoadAdapterRequest,
}


class StepRequests:
    """Gives steps to the worker, once `shard` is loaded. May be called from any thread."""

    def __init__(self, worker: Worker, step_log: StepLog | None = None) -> None:
        self.shard: Shard | None = None
        self._worker = worker
        self._step_log = step_log

    def loaded(self) -> Shard:
        if self.shard is None:
            raise ShardLoading("the shard is loading its weights")
        return self.shard

    def take(self, frame: Frame, send: Callable[[bytes], None]) -> None:
        """Starts the step in a frame. `send` gets the frame of its answer, as soon as there is one and in the thread
        that has it. FrameError: the frame is not a step."""
        try:
            request = KINDS[frame.kind].FromString(frame.message)
        except (KeyError, DecodeError):
            raise FrameError(f"a frame of kind {frame.kind} that is not a step") from None
        number = request.step
        try:
            future = self._submit(request)
        except ShardError as error:
            send(_refusal_frame(number, error))
            return
        future.add_done_callback(lambda done: send(_answer_frame(number, done)))

    def _submit(self, request: StepRequest) -> Future[Any]:
        if isinstance(request, pb.PrefillRequest):
            return self.prefill(request)
        if isinstance(request, pb.DecodeRequest):
            return self.decode(request)
        if isinstance(request, pb.FilterBatchRequest):
            return self.filter_batch(request)
        if isinstance(request, pb.LoadAdapterRequest):
            return self.load_adapter(request)
        return self.clear_cache(request)

    def prefill(self, request: pb.PrefillRequest) -> Future[pb.PrefillResponse]:
        cached = [request.cached_batch] if request.HasField("cached_batch") else []
        chunks = [_chunk(r) for r in request.batch.requests]
        return self._run(request, cached, request.batch.id, chunks, pb.PrefillResponse)

    def decode(self, request: pb.DecodeRequest) -> Future[pb.DecodeResponse]:
        return self._run(request, request.batches, 0, [], pb.DecodeResponse)

    def filter_batch(self, request: pb.FilterBatchRequest) -> Future[pb.FilterBatchResponse]:
        runner, batch_id, keep = self.loaded().runner, request.batch_id, list(request.request_ids)

        def run(clock: StepClock) -> pb.FilterBatchResponse:
            return pb.FilterBatchResponse(batch=_cached_batch(batch_id, runner.filter(batch_id, keep)))

        return self._worker.submit(request.epoch, request.step, run)

    def load_adapter(self, request: pb.LoadAdapterRequest) -> Future[pb.LoadAdapterResponse]:
        runner, slot, digest = self.loaded().runner, request.slot, request.digest

        def run(clock: StepClock) -> pb.LoadAdapterResponse:
            return pb.LoadAdapterResponse(refusal=runner.load_adapter(slot, digest)[:MAX_DETAILS])

        return self._worker.submit(request.epoch, request.step, run)

    def clear_cache(self, request: pb.ClearCacheRequest) -> Future[pb.ClearCacheResponse]:
        runner, batch_id = self.loaded().runner, request.id if request.HasField("id") else None

        def run(clock: StepClock) -> pb.ClearCacheResponse:
            runner.clear(batch_id)
            return pb.ClearCacheResponse()

        return self._worker.submit(request.epoch, request.step, run, clears=batch_id is None)

    def _run(
        self,
        request: ForwardRequest,
        batches: Iterable[pb.CachedBatch],
        new_batch_id: int,
        chunks: list[PromptChunk],
        response: type[ForwardResponse],
    ) -> Future[ForwardResponse]:
        runner: ModelRunner = self.loaded().runner
        decoding = [StepBatch(batch.id, list(batch.request_ids)) for batch in batches]
        slots, epoch, number = _int32_tensor(request.slots), request.epoch, request.step

        def run(clock: StepClock) -> Pending[ForwardResponse]:
            launched = runner.step(decoding, slots, new_batch_id, chunks)
            load = measure(runner.row_state.batches.rows, decoding, chunks) if self._step_log else None
            return launched.then(partial(answer, clock, load))

        def answer(clock: StepClock, load: StepLoad | None, output: StepOutput) -> ForwardResponse:
            if self._step_log and load:
                self._step_log.write(number, load, output, clock.gap_ns)
            return response(
                batch=_cached_batch(output.batch_id, output.batch_request_ids),
                forward_ns=output.forward_ns,
                total_ns=output.forward_ns + output.sampling_ns,
                result=_result(output, epoch, number, clock),
            )

        return self._worker.submit(epoch, number, run)


def status(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """The status of an answer that is an error, and its text."""
    return STATUS.get(type(error), grpc.StatusCode.INTERNAL), str(error)[:MAX_DETAILS]


def _answer_frame(number: int, done: Future[Any]) -> bytes:
    if (error := done.exception()) is not None:
        return _refusal_frame(number, error)
    return frames.pack(0, number, done.result().SerializeToString())


def _refusal_frame(number: int, error: BaseException) -> bytes:
    code, details = status(error)
    return frames.pack(code.value[0], number, details.encode())


def _chunk(request: pb.Request) -> PromptChunk:
    if not request.ids:
        return PromptChunk(request.id, request.start, request.end, request.last)
    ids, slots = _int32_tensor(request.ids), _int32_tensor(request.slots)
    prompt_logprobs = request.prompt_logprobs if request.HasField("prompt_logprobs") else None
    first = ids, slots, request.prompt_length, sampling_wire.from_pb(request), prompt_logprobs
    return PromptChunk(
        request.id, request.start, request.end, request.last, *first, adapter=request.adapter, note=request.note
    )


def _int32_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype="<i4").copy())


def _cached_batch(batch_id: int, request_ids: list[int]) -> pb.CachedBatch:
    return pb.CachedBatch(id=batch_id, request_ids=request_ids, size=len(request_ids))


def _result(output: StepOutput, epoch: int, number: int, clock: StepClock) -> pb.StepResult:
    result = pb.StepResult(
        epoch=epoch,
        step=number,
        request_ids=np.array(output.request_ids, dtype="<u8").tobytes(),
        token_ids=output.token_ids.numpy().astype("<i4").tobytes(),
        logprobs=output.logprobs.numpy().astype("<f4").tobytes(),
        top_counts=np.array(output.top_counts, dtype="<u4").tobytes(),
        top_ids=output.top_ids.numpy().astype("<i4").tobytes(),
        top_logprobs=output.top_logprobs.numpy().astype("<f4").tobytes(),
        sampling_ns=output.sampling_ns,
        gap_ns=clock.gap_ns,
        successor_queued=clock.successor_queued(),
        failures=[pb.FailedRequest(id=i, reason=reason) for i, reason in output.failures.items()],
        complete_ids=np.array(output.complete_ids, dtype="<u8").tobytes(),
    )
    if output.prompts is not None:
        _add_prompts(output.prompts, result)
    return result


def _add_prompts(prompts: PromptOutput, result: pb.StepResult) -> None:
    result.prompt_request_ids = np.array(prompts.request_ids, dtype="<u8").tobytes()
    result.prompt_counts = np.array(prompts.counts, dtype="<u4").tobytes()
    result.prompt_logprobs = prompts.logprobs.numpy().astype("<f4").tobytes()
    result.prompt_top_counts = np.array(prompts.top_counts, dtype="<u4").tobytes()
    result.prompt_top_ids = prompts.top_ids.numpy().astype("<i4").tobytes()
    result.prompt_top_logprobs = prompts.top_logprobs.numpy().astype("<f4").tobytes()
