"""Runs one step: takes rows and chunks, returns a token for each sampled row. Owns the model, rows and KV cache."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from text_generation_common import faults
from text_generation_common.errors import NO_TOKEN, NOT_FINITE, MemoryLimitError
from text_generation_common.memory import SURE_SHARE, choose_slots
from text_generation_server.device.arena import take_in_pieces, take_memory, zeros
from text_generation_server.device.graphs import Signal
from text_generation_server.device.kept import KeptMemory
from text_generation_server.device.memory import available_bytes, give_back_memory, memory_for, memory_of_cache
from text_generation_server.device.transfers import Moment, fetch
from text_generation_server.errors import StepError
from text_generation_server.forward import ForwardPass
from text_generation_server.grammars.compiler import GrammarCompiler
from text_generation_server.grammars.constraints import Constraints
from text_generation_server.grammars.rows import StepConstraints
from text_generation_server.kernels.interface import KvLayer, Masks
from text_generation_server.models.adapters import AdapterBank
from text_generation_server.models.model import Model
from text_generation_server.platforms import Platform
from text_generation_server.sampling.sampler import Sampled, Sampler, emit, read_out
from text_generation_server.step.preparation import Planner, PreparedStep, StepLimits
from text_generation_server.step.results import Pending, StepOutput
from text_generation_server.step.rows import Batches, ComputedRow, PromptChunk, Rows, StepBatch
from text_generation_server.step.warmup import (
    SMALL_ROWS,
    LongestPause,
    WarmupStep,
    all_allowed,
    largest_step,
    small_steps,
)

NO_SLOTS = torch.empty(0, dtype=torch.int32)
NOTHING_SAMPLED = Sampled(
    ids_R=NO_SLOTS,
    logprobs_R=torch.empty(0),
    finite_R=torch.empty(0, dtype=torch.bool),
    top_counts=(),
    top_ids_AK=torch.empty((0, 0), dtype=torch.int32),
    top_logprobs_AK=torch.empty((0, 0)),
)


@dataclass(frozen=True, slots=True)
class Capacity:
    slots: int
    max_total_tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What a Warmup has found for the values that it was asked with."""

    asked: tuple[int | None, ...]
    capacity: Capacity
    longest_pause_s: float


class ModelRunner:
    """Runs the steps of one rank. Not thread-safe: the worker's thread makes all calls.

    `on_progress` is called after every layer and graph, after the logits and after the sampling, to report progress. In
    a group, GroupBroken means that other ranks may be waiting for this rank, whose process must exit.
    """

    def __init__(
        self,
        model: Model,
        platform: Platform,
        sampler: Sampler,
        on_progress: Signal,
        kv_dtype: torch.dtype | None = None,
        memory_fraction: float = 1.0,
        constraints: Constraints | None = None,
        num_neighbours: int = 1,
        adapters: AdapterBank | None = None,
    ) -> None:
        """`kv_dtype` is the type of the cache's numbers, None for the model's own type. `memory_fraction` is the share
        of a GPU's memory that the shard may use, `num_neighbours` the number of shards that share the memory of CPUs.
        Without `constraints`, requests with a grammar fail. `adapters`: those of the model."""
        self.longest_pause_s = 0.0  # longest time between two progress reports in the largest step; 0: no Warmup yet
        self.measured: Measured | None = None  # by the last Warmup, of this process or of one with the same template
        self.kept: KeptMemory | None = None  # where the cache lies, if it is to outlive this process
        self.has_kept_cache = False  # whether the last Warmup found the content that it was asked for
        # What the last Warmup found in the cache, in the rows that it ended: for a router that has not sent them.
        self.computed: list[ComputedRow] = []
        # Number of steps since `clear(None)` that have failed, or with a logit that is not finite.
        self._num_unsound = 0
        self._model = model
        self._platform = platform
        self._device = platform.device
        self._kernels = platform.kernels
        self._group = platform.group
        self._vocabulary_part = platform.kernels.vocabulary_part(model.vocab_size, platform.group.size)
        self._mark = platform.mark
        self._sampler = sampler
        self._on_progress = on_progress
        self._kv_dtype = kv_dtype or model.dtype
        self._memory_fraction = memory_fraction
        self._num_neighbours = max(num_neighbours, platform.group.size)
        self._constraints = constraints or Constraints(GrammarCompiler(None), platform.device)
        self._adapters = adapters or AdapterBank()
        self._kv_cache: list[KvLayer] = []
        self._row_state: RowState | None = None
        self._untaken: Iterator[None] = iter(())  # the pieces of the cache whose memory is not taken yet

    @property
    def row_state(self) -> "RowState":
        if self._row_state is None:
            raise StepError("the shard has had no Warmup yet")
        return self._row_state

    @property
    def num_rows(self) -> int:
        """Number of requests that have a row."""
        return len(self._row_state.batches.rows) if self._row_state is not None else 0

    @torch.inference_mode()
    def warmup(
        self,
        max_prefill_tokens: int,
        max_total_tokens: int | None,
        requests: int,
        wanted: int | None,
        max_rows: int | None = None,
        content: int = 0,
        known_content: int = 0,
    ) -> Capacity:
        """Runs small steps and the largest step on a small cache, on a CPU in one layer of each kind. Then makes the
        cache as large as memory and limits allow, and records steps on it. All ranks get a cache of the size that fits
        the rank with the least memory. On a GPU no kernel is compiled and no step is recorded later. `max_rows` of the
        `requests` run at once (None: all); the others keep slots only, as cached prefixes.

        A Warmup with the values of the one before measures nothing: requests of other processes wait for it. The cache
        is then that of the process before, if it has the content `known_content` (0: no content is known), and if it
        could outlive that process. `content` names what is written from now on. Until the first step the cache has its
        name of before, too: a router that asks for that name has had no answer to a Warmup since, and so has sent no
        step. A shard that is killed between the naming and the answer therefore costs no cache. Memory with the old
        name has exactly the old content, because `step` takes the name away before it writes.
        """
        limit = self._model.max_total_tokens
        if max_total_tokens is not None and max_total_tokens > limit:
            raise StepError(f"`max_total_tokens={max_total_tokens}` is more than the {limit} the shard was loaded for")
        self._constraints.await_tokenizer()
        longest, rows = max_total_tokens or limit, min(requests, max_rows or requests)
        asked = (max_prefill_tokens, max_total_tokens, requests, wanted, max_rows)
        if (capacity := self._warm_up_again(asked, rows, known_content)) is not None:
            self._name_content(content, known_content if self.has_kept_cache else 0)
            faults.point("shard.named")
            return capacity
        self.measured = None
        self._run_largest_step(max_prefill_tokens, longest)
        with self._group.agreement("measure its memory"):
            faults.point("shard.warmup")
            own = self._available_bytes()
        with self._group.collective_work("the warm-up"):
            available = max(0, min(self._group.exchange(own)) - rows * self._model.bytes_per_row)
        per_slot = self._model.bytes_per_slot(self._kv_dtype)
        with self._group.agreement("make its KV cache"):
            # A limit that the user chose must fit into memory. A limit that comes from the model is lowered if memory
            # is short.
            needed = longest if max_total_tokens is not None else min(longest, max(1, available // per_slot))
            slots = choose_slots(per_slot, available, requests * needed, wanted, at_least=min(needed, wanted or needed))
        # The memory of a small cache will be there after the start, too.
        is_small = slots * per_slot < available * SURE_SHARE
        capacity = Capacity(slots, min(longest, slots))
        self._make_whole_cache(capacity, rows, taken=max_prefill_tokens if is_small else slots + 1)
        self.measured = Measured(asked, capacity, self.longest_pause_s)
        self._name_content(content)
        return capacity

    def _name_content(self, content: int, old: int = 0) -> None:
        if self.kept is not None:
            self.kept.rename(content, old)

    def _warm_up_again(self, asked: tuple[int | None, ...], rows: int, known_content: int) -> Capacity | None:
        """What was measured for these values, with the cache made, and no request in it. None if they are new, or the
        memory is not there any more: another process may have taken it while no shard had it."""
        known = self.measured if self.measured is not None and self.measured.asked == asked else None
        self.has_kept_cache, self.computed = False, []
        is_kept = self.kept is not None and self.kept.has(known_content)
        with self._group.collective_work("the warm-up"):
            if not self._group.all_agree(known is not None) or known is None:
                return None
            has_cache = self._group.all_agree(self._row_state is not None)
            is_kept = self._group.all_agree(is_kept)
        if has_cache:
            if not self._num_unsound:
                self.computed = self.row_state.batches.rows.computed()
            self.clear(None)
            return known.capacity
        self.longest_pause_s = known.longest_pause_s
        if not is_kept:
            self._name_content(0)
        try:
            # Memory without a sound content is used again, too: no kernel reads a slot that has not been written.
            self._make_whole_cache(known.capacity, rows, taken=0 if is_kept else asked[0] or 0, again=True)
        except MemoryLimitError:
            return None
        self.has_kept_cache = is_kept
        return known.capacity

    def _make_whole_cache(self, capacity: Capacity, rows: int, taken: int, again: bool = False) -> None:
        """Makes the cache and records steps on it. The memory of its first `taken` slots is taken now, and the rest
        between steps. `again`: in the memory that the process before has left."""
        slots, per_slot = capacity.slots, self._model.bytes_per_slot(self._kv_dtype)
        with self._group.agreement("make its KV cache"), memory_of_cache(slots, per_slot, self._available_bytes):
            if self.kept is not None:
                self.kept.begin(again)
            self._make_room(self._model, slots, rows, capacity.max_total_tokens, taken, kept=self.kept)
            left = [tensor[taken:] for tensor in self._cache_tensors()]
            self._untaken = take_in_pieces(left) if self.kept is None else self.kept.take_in_pieces(left)
        with self._group.collective_work("recorded steps"):
            self.row_state.forward.record(self._on_progress)
            self._mark().wait()

    def take_piece(self) -> bool:
        """Takes the memory of one more piece of the cache, between steps. Returns whether there was one. Memory that is
        kept has huge pages by this alone."""
        return next(self._untaken, self) is None

    def _available_bytes(self) -> int:
        return available_bytes(self._device, self._num_neighbours, self._memory_fraction)

    def _make_room(
        self, model: Model, slots: int, rows: int, longest: int, taken: int, *, kept: KeptMemory | None = None
    ) -> None:
        """Makes the cache, in `kept` or in memory of its own, and takes memory for its first `taken` slots now and not
        under load."""
        self._platform.clear_graphs()
        self._constraints.clear()
        make, take = (zeros, take_memory) if kept is None else (kept.tensor, kept.take)
        self._kv_cache = model.make_cache(slots, rows, self._kv_dtype, make)
        for tensor in self._cache_tensors():
            take(tensor[:taken])
            self._on_progress()
        batches = Batches(Rows(rows, longest, self._device, padding_slot=slots, adapter_slots=self._adapters.slots))
        planner = Planner(batches, StepLimits(self._model.vocab_size, slots))
        forward = ForwardPass(model, self._platform, self._kv_cache, batches.rows, slots)
        self._row_state = RowState(batches, planner, forward)

    def _cache_tensors(self) -> list[Tensor]:
        return [each for layer in self._kv_cache for each in (layer.heads, layer.scales) if each is not None]

    def _run_largest_step(self, tokens: int, longest: int) -> None:
        with self._group.agreement("prepare the largest step"), memory_for(tokens):
            # Graphs from before this Warmup use the old cache.
            self._platform.clear_graphs()
            self._kv_cache, self._row_state, self._untaken = [], None, iter(())
            if self.kept is not None:
                self.kept.begin(again=False)
            give_back_memory(self._device)
            largest = WarmupStep([], NO_SLOTS, largest_step(tokens, longest))
            # A CPU would compute for minutes. On a GPU all layers run, so that all their kernels are compiled.
            model = self._model.one_layer_of_each_kind() if self._device.type == "cpu" else self._model
            self._make_room(model, tokens, max(SMALL_ROWS, len(largest.chunks)), longest, tokens)
        # The first steps compile kernels, which takes seconds without a progress report. So pauses are measured later:
        # the longest pause decides when a shard is taken to hang.
        for step in small_steps(tokens, longest):
            self._run_warmup_step(step, tokens, self._on_progress)
        self.clear(None)
        pauses = LongestPause(self._on_progress)
        self._run_warmup_step(largest, tokens, pauses)
        self.longest_pause_s = pauses.seconds

    def _run_warmup_step(self, step: WarmupStep, tokens: int, on_progress: Signal) -> None:
        # What adapters add to the layers' outputs takes memory, too.
        chunks = [replace(chunk, adapter=self._adapters.any_slot) for chunk in step.chunks]
        with self._group.agreement("prepare a step of the warm-up"), memory_for(tokens):
            prepared = self.row_state.planner.prepare(step.decoding, step.slots_R, 0, chunks)
        with self._group.collective_work("a step of the warm-up"), memory_for(tokens):
            self._launch(prepared, self._mark(), on_progress, on_progress, self._allow_all).wait()

    def _allow_all(self, step: PreparedStep) -> StepConstraints | None:
        """Masks with every token, for the step's rows that have a grammar; None if no row has one."""
        places = self._sampler.constrained(self.row_state.batches.rows, step.sampled.rows)
        masks = all_allowed(places, self._model.vocab_size, self._device) if places else None
        return None if masks is None else StepConstraints(masks, is_read=True)

    def _constrain(self, step: PreparedStep) -> StepConstraints | None:
        """The masks of the step's rows that have a grammar; None if no row has one."""
        if not self._constraints.num_rows:
            return None
        places = self._sampler.constrained(self.row_state.batches.rows, step.sampled.rows)
        return self._constraints.begin(step.sampled.request_ids, places) if places else None

    def close(self) -> None:
        """Drops all recordings. Must be called before a group of GPUs is left: NCCL waits until no CUDA graph with its
        collectives exists (https://github.com/pytorch/pytorch/issues/115388).
        """
        self._platform.clear_graphs()
        gc.collect()
        self._mark().wait()

    @torch.inference_mode()
    def step(
        self,
        decoding: list[StepBatch],
        slots_R: Tensor,
        new_batch_id: int,
        chunks: list[PromptChunk],
    ) -> Pending[StepOutput]:
        """Launches a step, which makes one token for every request of `decoding` and every last chunk. `slots_R` are
        the slots of the newest tokens of `decoding`. The next step may be launched before this step is complete.

        Joins the batches of `decoding`. New requests join this batch, or make the batch `new_batch_id`.
        """
        self._num_unsound += 1
        if self.kept is not None:
            self.kept.rename(self.kept.content)  # and no old name
        self._platform.wake()
        started = self._mark()
        state = self.row_state
        with self._group.agreement("prepare the step"):
            step = state.planner.prepare(decoding, slots_R, new_batch_id, chunks)
            if self._group.rank == 0:
                self._constraints.join(chunks)
        with self._group.collective_work("a step"):
            faults.point("shard.step")
            if chunks:
                faults.point("shard.chunk", lambda: state.batches.rows.ids(chunks))
            on_layer = _then_fail(self._on_progress, "shard.prefill" if chunks else "shard.decode")
            return self._launch(step, started, self._on_progress, on_layer, self._constrain).then(self._note_end)

    def _note_end(self, output: StepOutput) -> StepOutput:
        self._num_unsound -= output.is_finite
        return output

    def _launch(
        self,
        step: PreparedStep,
        started: Moment,
        on_progress: Signal,
        on_layer: Signal,
        constrain: Callable[[PreparedStep], StepConstraints | None],
    ) -> Pending[StepOutput]:
        """`constrain` gives the masks of the step's sampled rows. Rank 0 calls it when the forward pass has been
        launched."""
        newest, samples = None, self._group.rank == 0 and bool(step.sampled.rows)
        if samples:
            newest = self._sampler.before(self.row_state.batches.rows, step.sampled.rows, self._mark)
        logits, rows_R, scores = self.row_state.forward(step, on_layer, partial(self._logits, step))
        on_progress()
        forwarded = self._mark()
        constraints = constrain(step) if samples else None
        sampled = self._sample(logits, step, rows_R, newest, constraints.masks if constraints else None)
        on_host = sampled.moved(fetch)
        scores_on_host = None if scores is None else scores.moved(fetch)
        done = self._mark()
        if constraints:
            constraints.note_sampled(on_host.ids_R, on_host.finite_R, done)

        def read() -> StepOutput:
            with self._group.collective_work("a step"), torch.inference_mode():
                done.wait()
                on_progress()
                result = read_out(on_host)
                prompts = None if scores_on_host is None else scores_on_host.read_out()
                if constraints:
                    self._constraints.finish(constraints)
            ids = step.sampled.request_ids if self._group.rank == 0 else []
            failures = {ids[i]: NO_TOKEN if i in result.without_token else NOT_FINITE for i in result.not_finite}
            if constraints:
                failures |= constraints.failures
            return StepOutput(
                batch_id=step.batch.id,
                batch_request_ids=batch_request_ids,
                request_ids=ids,
                token_ids=result.token_ids,
                logprobs=result.logprobs,
                top_counts=result.top_counts,
                top_ids=result.top_ids,
                top_logprobs=result.top_logprobs,
                failures=failures,
                is_finite=len(result.not_finite) == len(result.without_token),
                forward_ns=forwarded.ns_since(started),
                sampling_ns=done.ns_since(forwarded),
                prompts=prompts,
                complete_ids=constraints.complete_ids if constraints else (),
            )

        batch_request_ids = list(step.batch.request_ids)  # a copy: the next step may change the batch
        return Pending(done, read)

    def _logits(self, step: PreparedStep, hidden_TH: Tensor, adapters_T: Tensor | None) -> Tensor | None:
        """The logits of all ids on rank 0, and None on other ranks; or on every rank the logits of its own ids."""
        if self._samples_parts(step):
            return self._model.own_logits(hidden_TH, adapters_T)
        return self._model.logits(hidden_TH, adapters_T)

    def _samples_parts(self, step: PreparedStep) -> bool:
        rows, part = self.row_state.batches.rows, self._vocabulary_part
        return self._sampler.works_on_parts(rows, step.sampled.rows, self._group, part)

    def _sample(
        self,
        logits: Tensor | None,
        step: PreparedStep,
        rows_R: Tensor,
        newest: Pending[list[int]] | None,
        masks: Masks | None,
    ) -> Sampled:
        """Samples on rank 0, and appends the sampled tokens to the rows of every rank."""
        if not step.sampled.rows:
            return NOTHING_SAMPLED
        rows, index = self.row_state.batches.rows, step.sampled.rows
        sampled = None
        if logits is not None and self._samples_parts(step):
            model = self._model
            sampled = self._sampler.sample_parts(
                logits, model.vocabulary, model.vocab_size, rows=rows, index=index, group=self._group
            )
        elif logits is not None:
            sampled = self._sampler(logits, rows, index, newest, masks)
        if sampled is not None:
            emit(sampled.ids_R, rows, index)
        ids_R = self._group.broadcast(torch.empty_like(rows_R) if sampled is None else sampled.ids_R)
        self._kernels.advance(rows.history, rows.lengths, rows_R, ids_R)
        rows.note_tokens(step.sampled.rows_R)
        return sampled or NOTHING_SAMPLED

    def load_adapter(self, slot: int, digest: str) -> str:
        """Copies an adapter into a slot, on all ranks or on none. Returns why it cannot be loaded, or ""."""
        refusal = self._adapters.prepare(digest)
        if not self._group.all_agree(not refusal):
            return refusal or "another rank cannot load the adapter: its log says why"
        with self._group.collective_work("loading an adapter"):
            self._adapters.put(slot, digest)
        return ""

    def filter(self, batch_id: int, keep: list[int]) -> list[int]:
        kept = self.row_state.batches.filter(batch_id, keep)
        self._constraints.keep(self.row_state.batches.rows)
        return list(kept.request_ids)

    def clear(self, batch_id: int | None) -> None:
        if self._row_state is not None:
            self._row_state.batches.clear(batch_id)
            self._constraints.keep(self._row_state.batches.rows)
        if batch_id is None:
            self._constraints.clear()
            self._num_unsound = 0


@dataclass(frozen=True, slots=True)
class RowState:
    """All that a Warmup makes: the rows, and the objects that use them."""

    batches: Batches
    planner: Planner
    forward: ForwardPass


def _then_fail(on_layer: Callable[[], None], point: str) -> Callable[[], None]:
    """Calls `on_layer`; after the first layer of a forward it also passes a fault point, where tests make a step
    fail.
    """
    layers = 0

    def done() -> None:
        nonlocal layers
        layers += 1
        on_layer()
        if layers == 1:
            faults.point(point)

    return done
