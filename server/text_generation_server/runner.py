"""Runs one step: rows and chunks in, a token for each sampled row out. Knows the model, the rows and the KV cache."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_launcher import faults
from text_generation_server.batch import Batches, PromptChunk, Rows, StepBatch
from text_generation_server.distributed import Group
from text_generation_server.errors import MemoryLimitError, StepError
from text_generation_server.kernels import Backend
from text_generation_server.kv_cache import available_bytes, bytes_per_slot, choose_slots, make_kv_cache
from text_generation_server.models.config import ModelConfig
from text_generation_server.models.llama import Llama
from text_generation_server.preparation import Limits, PreparedStep, prepare
from text_generation_server.sampling.parameters import Parameters
from text_generation_server.sampling.sampler import Sampled, Sampler

# Below this many rows a float32 product on a CPU takes another path through the BLAS, and other last bits come out.
MIN_EXACT_ROWS = 16
NO_SLOTS = torch.empty(0, dtype=torch.int32)
NOTHING_SAMPLED = Sampled(torch.empty(0, dtype=torch.int64), torch.empty(0), [], NO_SLOTS, torch.empty(0), [])


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One token for each of `request_ids`; times in nanoseconds. Ranks other than 0 name no requests."""

    batch_id: int
    batch_request_ids: list[int]
    request_ids: list[int]
    token_ids: Tensor  # int32, on the host, like the others
    logprobs: Tensor  # float32
    top_counts: list[int]
    top_ids: Tensor
    top_logprobs: Tensor
    not_finite_ids: list[int]  # those of request_ids whose logits had a NaN or an infinity: their tokens mean nothing
    forward_ns: int
    sampling_ns: int


@dataclass(frozen=True, slots=True)
class Capacity:
    slots: int
    max_total_tokens: int


class ModelRunner:
    """Not thread-safe: everything here is called by the worker's one thread.

    `on_progress` is called after every layer, after the logits and after the sampling, as a sign of life. In a group,
    GroupBroken means that the other ranks may be waiting for this one: its process has to exit.
    """

    def __init__(
        self,
        model: Llama,
        config: ModelConfig,
        backend: Backend,
        sampler: Sampler,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
        max_total_tokens: int,
        on_progress: Callable[[], None],
    ) -> None:
        self.longest_pause_s = 0.0  # the longest time without a sign of life in the largest step; 0: no Warmup yet
        self._model = model
        self._config = config
        self._kernels = backend.kernels
        self._sampler = sampler
        self._group = group
        self._device = device
        self._dtype = dtype
        self._max_total_tokens = max_total_tokens
        self._on_progress = on_progress
        self._min_rows = MIN_EXACT_ROWS if device.type == "cpu" and dtype == torch.float32 else 1
        self._kv_cache: list[Tensor] = []
        self._batches: Batches | None = None

    @property
    def batches(self) -> Batches:
        if self._batches is None:
            raise StepError("the shard has had no Warmup yet")
        return self._batches

    @torch.inference_mode()
    def warmup(
        self, max_prefill_tokens: int, max_total_tokens: int | None, requests: int, wanted: int | None
    ) -> Capacity:
        """Runs the largest step on a small cache, then makes the cache as large as memory and limits allow: on all
        ranks what the one with least memory can hold."""
        limit = self._max_total_tokens
        if max_total_tokens is not None and max_total_tokens > limit:
            raise StepError(f"`max_total_tokens={max_total_tokens}` is more than the {limit} the shard was loaded for")
        longest = max_total_tokens or limit
        self._kv_cache = []
        self._run_largest_step(max_prefill_tokens, longest)
        with self._group.agreement("measure its memory"):
            faults.point("shard.warmup")
            own = available_bytes(self._device, self._group.size)
        with self._group.owing("the warm-up"):
            available = min(self._group.exchange(own))
        with self._group.agreement("make its KV cache"):
            per_slot = bytes_per_slot(self._config, self._model.num_kv_heads, self._dtype)
            # A limit that the model suggests, not the user, gives way where memory is short.
            needed = longest if max_total_tokens is not None else min(longest, max(1, available // per_slot))
            slots = choose_slots(per_slot, available, requests * needed, wanted, at_least=min(needed, wanted or needed))
            longest = min(longest, slots)
            self._make_room(slots, requests, longest)
        return Capacity(slots, longest)

    def _make_room(self, slots: int, rows: int, longest: int) -> None:
        self._kv_cache = make_kv_cache(
            self._config, self._model.num_kv_heads, slots, self._dtype, self._device, self._on_progress
        )
        self._batches = Batches(Rows(rows, longest, self._device))

    def _run_largest_step(self, tokens: int, longest: int) -> None:
        """As many prompts as fill `tokens`, sampled with every option."""
        options = Parameters(
            greedy=False, temperature=0.9, top_k=10, top_p=0.9, typical_p=0.9, repetition_penalty=1.2,
            frequency_penalty=0.1, watermark=True, top_n_tokens=5,
        )  # fmt: skip
        firsts = range(0, tokens, longest - 1)
        pauses = LongestPause(self._on_progress)
        with self._group.agreement("prepare the largest step"), _memory_for(tokens):
            self._make_room(tokens, len(firsts), longest)
            ids, slots = torch.zeros(longest, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32)
            chunks = []
            for first in firsts:
                length = min(longest - 1, tokens - first)
                own_slots = slots[first : first + length]
                chunks.append(PromptChunk(first, 0, length, True, ids[:length], own_slots, length, options))
            step = self._prepare([], NO_SLOTS, 0, chunks)
        with self._group.owing("the largest step"), _memory_for(tokens):
            self._compute(step, time.perf_counter_ns(), pauses, pauses)
        self.longest_pause_s = pauses.seconds

    @torch.inference_mode()
    def step(
        self,
        decoding: list[StepBatch],
        slots_R: Tensor,
        new_batch_id: int,
        chunks: list[PromptChunk],
    ) -> StepOutput:
        """One token for every request of `decoding`, whose inputs get `slots_R`, and for every last chunk.

        The batches of `decoding` become one; new requests join it, or make the batch `new_batch_id`.
        """
        started = time.perf_counter_ns()
        with self._group.agreement("prepare the step"):
            step = self._prepare(decoding, slots_R, new_batch_id, chunks)
        with self._group.owing("a step"):
            faults.point("shard.step")
            on_layer = _then_fail(self._on_progress, "shard.prefill" if chunks else "shard.decode")
            return self._compute(step, started, self._on_progress, on_layer)

    def _prepare(
        self, decoding: list[StepBatch], slots_R: Tensor, new_batch_id: int, chunks: list[PromptChunk]
    ) -> PreparedStep:
        batches = self.batches
        limits = Limits(self._config.vocab_size, self._kv_cache[0].shape[0] - 1, self._min_rows)
        return prepare(batches, limits, decoding, slots_R, new_batch_id, chunks)

    def _compute(
        self, step: PreparedStep, started: int, on_progress: Callable[[], None], on_layer: Callable[[], None]
    ) -> StepOutput:
        hidden = self._model.forward(step.input, self._kv_cache, on_layer)
        logits = self._logits(hidden, step)
        on_progress()
        forwarded = time.perf_counter_ns()
        sampled = self._sample(logits, step)
        output = StepOutput(
            step.batch.id,
            list(step.batch.request_ids),
            step.sampled_ids if self._group.rank == 0 else [],
            sampled.ids_R.int().cpu(),
            sampled.logprobs_R.cpu(),
            sampled.top_counts,
            sampled.top_ids,
            sampled.top_logprobs,
            [step.sampled_ids[i] for i in sampled.not_finite],
            forwarded - started,
            time.perf_counter_ns() - forwarded,
        )
        on_progress()
        return output

    def _logits(self, hidden: Tensor, step: PreparedStep) -> Tensor | None:
        """Those of the rows that get a token, on rank 0; None on the others, and where no row gets one."""
        if not step.sampled_rows:
            return None
        logits = self._model.logits(hidden[step.sampled_tokens])
        return None if logits is None else logits[: len(step.sampled_rows)]

    def _sample(self, logits: Tensor | None, step: PreparedStep) -> Sampled:
        """Rank 0 samples; every rank appends what it sampled."""
        index = step.sampled_rows
        if not index:
            return NOTHING_SAMPLED
        rows = self.batches.rows
        index_R = torch.tensor(index, dtype=torch.int64, device=self._device)
        sampled = NOTHING_SAMPLED if logits is None else self._sampler(logits, rows, index)
        ids_R = self._group.broadcast(torch.empty_like(index_R) if logits is None else sampled.ids_R)
        self._kernels.advance(rows.history, rows.lengths, index_R, ids_R)
        rows.note_tokens(index)
        return sampled

    def filter(self, batch_id: int, keep: list[int]) -> list[int]:
        return list(self.batches.filter(batch_id, keep).request_ids)

    def clear(self, batch_id: int | None) -> None:
        if self._batches is not None:
            self._batches.clear(batch_id)


class LongestPause:
    """Passes signs of life on, and measures the longest time without one."""

    def __init__(self, on_progress: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._on_progress = on_progress
        self._clock = clock
        self._last = clock()

    def __call__(self) -> None:
        now = self._clock()
        self.seconds, self._last = max(self.seconds, now - self._last), now
        self._on_progress()


def _then_fail(on_layer: Callable[[], None], point: str) -> Callable[[], None]:
    """After the first layer of a forward there is a place where tests make it fail."""
    layers = 0

    def done() -> None:
        nonlocal layers
        layers += 1
        on_layer()
        if layers == 1:
            faults.point(point)

    return done


@contextmanager
def _memory_for(tokens: int) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch has a class for GPUs and a text for CPUs
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(error):
            raise
        raise MemoryLimitError(
            f"Not enough memory to handle {tokens} prefill tokens. You need to decrease `--max-batch-prefill-tokens`"
        ) from None
