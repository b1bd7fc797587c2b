"""Plans a step: finds the rows of its requests, and checks the step completely before anything is computed.

In a group, a single rank may fail here without harm to the others; afterwards all ranks enter the step's collectives.
No function here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from torch import Tensor

from text_generation_server.errors import StepError
from text_generation_server.step.parameters import RowParameters, check_token_lists
from text_generation_server.step.rows import NO_ADAPTER, Batch, Batches, Int32s, PromptChunk, Rows, StepBatch


@dataclass(frozen=True, slots=True)
class StepLimits:
    vocab_size: int
    slots: int  # number of token slots of the KV cache. The extra slot for padding comes after them and is not counted.


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Some requests of a step, in the step's order, and their rows. Steps that decode the same requests share one such
    value.
    """

    request_ids: list[int]
    rows_R: Int32s
    rows: tuple[int, ...]  # the same rows as Python integers
    adapters_R: Int32s | None = None  # the slot of each row's adapter; None: no row has one


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """The tokens at positions start … end - 1 of a row."""

    row: int
    start: int
    end: int
    last: bool  # whether the chunk ends the prompt, so that a token is sampled after it
    adapter: int = NO_ADAPTER


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The P tokens of a step's chunks after which a token of the prompt follows whose log-probability is wanted."""

    request_ids: tuple[int, ...]  # the requests that have such tokens, in the order of their chunks
    counts: tuple[int, ...]  # number of these tokens of each request
    top_counts: tuple[int, ...]  # number of most likely tokens that each request wants with each log-probability
    tokens_P: Int32s  # indices of the tokens within the step
    rows_P: Int32s
    positions_P: Int32s  # positions of the tokens that follow


@dataclass(frozen=True, slots=True)
class PreparedStep:
    batch: Batch
    decode: RequestRows
    slots_R: Int32s
    chunks: tuple[PlacedChunk, ...]
    sampled: RequestRows  # requests that get a token: all that decode, then those whose prompt ends
    scored: ScoredTokens | None = None  # None: no log-probability of a prompt's token is wanted

    @property
    def has_adapters(self) -> bool:
        return self.decode.adapters_R is not None or any(chunk.adapter >= 0 for chunk in self.chunks)

    @property
    def tokens(self) -> int:
        """Number of tokens that the step computes, without padding."""
        return len(self.decode.rows) + sum(chunk.end - chunk.start for chunk in self.chunks)


class Planner:
    """Prepares the steps over the batches of a shard."""

    def __init__(self, batches: Batches, limits: StepLimits) -> None:
        self._batches = batches
        self._limits = limits
        # The decode rows of the last step, and the arguments for which they were found. Most steps decode the same rows
        # as the step before.
        self._last_decode = _request_rows([], ())
        self._last_asked: tuple[list[StepBatch], int] | None = None

    def prepare(
        self, decoding: list[StepBatch], slots_R: Tensor, new_batch_id: int, chunks: list[PromptChunk]
    ) -> PreparedStep:
        """Joins the batches of `decoding`. New requests join this batch, or make the batch `new_batch_id`.

        StepError for a step that contradicts rows or batches. When `_check` raises it, nothing has been changed.
        """
        slots = slots_R.numpy()
        decode = self._check(decoding, slots, chunks)
        batches, rows = self._batches, self._batches.rows
        chunk_rows = [rows.join(chunk) if chunk.ids is not None else rows.row(chunk.request_id) for chunk in chunks]
        if decoding:
            batches.merge([batch.id for batch in decoding])
        batch_id = decoding[0].id if decoding else new_batch_id
        batch = batches.join(batch_id, {chunk.request_id for chunk in chunks}) if chunks else batches.take(batch_id, [])
        placed = tuple(
            PlacedChunk(row, c.start, c.end, c.last, int(rows.adapters[row]))
            for row, c in zip(chunk_rows, chunks, strict=True)
        )
        sampled, scored = decode, None
        if chunks:
            lasts = [(c.request_id, row) for row, c in zip(chunk_rows, chunks, strict=True) if c.last]
            sampled_rows = (*decode.rows, *(row for _, row in lasts))
            sampled = _request_rows([*decode.request_ids, *(i for i, _ in lasts)], sampled_rows)
            scored = _scored_tokens([c.request_id for c in chunks], placed, rows.parameters, len(decode.rows))
        return PreparedStep(batch=batch, decode=decode, slots_R=slots, chunks=placed, sampled=sampled, scored=scored)

    def _check(self, decoding: list[StepBatch], slots: Int32s, chunks: list[PromptChunk]) -> RequestRows:
        """Returns the decoding requests, in order. Raises StepError, and changes nothing."""
        rows, limits = self._batches.rows, self._limits
        decode = self._decode_rows(decoding)
        if len(decode.rows) != len(slots):
            raise StepError(f"{len(decode.rows)} rows came with {len(slots)} slots")
        if not decode.rows and not chunks:
            raise StepError("a step must carry at least one row or chunk")
        if decode.rows and not 0 <= min(of_rows := slots.tolist()) <= max(of_rows) < limits.slots:
            raise StepError(f"the rows came with a slot that is not one of the {limits.slots}")
        known = rows.known[decode.rows_R].tolist()
        if known and (most := max(known)) >= rows.length:
            _check_room(rows, decode.request_ids[known.index(most)], most)
        for chunk in chunks:
            _check_chunk(rows, limits, chunk)
        return decode

    def _decode_rows(self, decoding: list[StepBatch]) -> RequestRows:
        rows = self._batches.rows
        if self._last_asked == (decoding, rows.changes):
            return self._last_decode
        for batch in decoding:
            self._batches.take(batch.id, batch.request_ids)
        ids = [request_id for batch in decoding for request_id in batch.request_ids]
        if len(set(ids)) != len(ids):
            raise StepError("a step names a request twice")
        decode = _request_rows(ids, tuple(rows.row(request_id) for request_id in ids))
        adapters_R = rows.adapters[decode.rows_R]
        self._last_decode = replace(decode, adapters_R=adapters_R) if (adapters_R >= 0).any() else decode
        self._last_asked = (decoding, rows.changes)
        return self._last_decode


def _request_rows(request_ids: list[int], rows: tuple[int, ...]) -> RequestRows:
    return RequestRows(request_ids, np.array(rows, dtype=np.int32), rows)


def _scored_tokens(
    request_ids: list[int], chunks: Sequence[PlacedChunk], parameters: RowParameters, first: int
) -> ScoredTokens | None:
    """`first`: index of the first chunk's first token within the step."""
    found, starts = [], accumulate((chunk.end - chunk.start for chunk in chunks), initial=first)
    for request_id, chunk, start in zip(request_ids, chunks, starts, strict=False):
        top_count = parameters.prompt_logprobs[chunk.row]
        count = min(chunk.end, parameters.prompt_length[chunk.row] - 1) - chunk.start
        if top_count is not None and count > 0:
            found.append((request_id, count, top_count, start, chunk.row, chunk.start + 1))
    if not found:
        return None
    ids, counts, top_counts, starts_C, rows_C, firsts_C = zip(*found, strict=True)
    within_P = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    starts_P, rows_P, firsts_P = (np.repeat(np.array(x, np.int32), counts) for x in (starts_C, rows_C, firsts_C))
    return ScoredTokens(
        request_ids=ids,
        counts=counts,
        top_counts=top_counts,
        tokens_P=starts_P + within_P,
        rows_P=rows_P,
        positions_P=firsts_P + within_P,
    )


def _check_chunk(rows: Rows, limits: StepLimits, chunk: PromptChunk) -> None:
    known = int(rows.known[rows.row(chunk.request_id)]) if chunk.ids is None else len(chunk.ids)
    if not 0 <= chunk.start < chunk.end <= known:
        raise StepError(f"request {chunk.request_id}: {known} tokens have no chunk {chunk.start}:{chunk.end}")
    if chunk.ids is not None and not _within(chunk.ids.numpy(), limits.vocab_size):
        raise StepError(f"request {chunk.request_id}: an id is not one of the {limits.vocab_size} of the vocabulary")
    if chunk.slots is not None and not _within(chunk.slots.numpy(), limits.slots):
        raise StepError(f"request {chunk.request_id}: a slot is not one of the {limits.slots}")
    if chunk.adapter and chunk.adapter not in rows.adapter_slots:
        raise StepError(f"request {chunk.request_id}: this shard has no adapter {ascii(chunk.adapter)[:80]}")
    if chunk.sampling is not None:
        check_token_lists(chunk.sampling, limits.vocab_size)
    if chunk.last:
        _check_room(rows, chunk.request_id, known)


def _check_room(rows: Rows, request_id: int, known: int) -> None:
    if known >= rows.length:
        raise StepError(f"request {request_id}: no room for another token after {known} of {rows.length}")


def _within(values: Int32s, end: int) -> bool:
    # As unsigned numbers, negative numbers are larger than any `end`, so one comparison finds both errors.
    return not len(values) or int(values.view(np.uint32).max()) < end
