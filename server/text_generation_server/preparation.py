"""Lays out a step: which row is where, and all that can be wrong with it before anything is computed.

In a group of ranks this is what may fail on one of them alone; after it, they are committed to the step's collectives.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_server.batch import Batch, Batches, PromptChunk, Rows, StepBatch
from text_generation_server.errors import StepError
from text_generation_server.models.step import Chunk, StepInput


@dataclass(frozen=True, slots=True)
class Limits:
    vocab_size: int
    slots: int  # of the KV cache; the extra one, for padding, comes after them
    min_rows: int  # a step is padded to as many tokens


@dataclass(frozen=True, slots=True)
class PreparedStep:
    batch: Batch
    input: StepInput
    sampled_ids: list[int]  # the requests that get a token
    sampled_rows: list[int]
    sampled_tokens: Tensor  # int64: which of the T tokens they are sampled from, padded


def prepare(
    batches: Batches,
    limits: Limits,
    decoding: list[StepBatch],
    slots_R: Tensor,
    new_batch_id: int,
    chunks: list[PromptChunk],
) -> PreparedStep:
    """The batches of `decoding` become one; new requests join it, or make the batch `new_batch_id`.

    StepError for what does not fit; what `_check` finds has changed nothing.
    """
    rows = batches.rows
    decode_ids = _check(batches, limits, decoding, slots_R, chunks)
    decode_rows = [rows.row(i) for i in decode_ids]
    chunk_rows = [rows.join(chunk) if chunk.ids is not None else rows.row(chunk.request_id) for chunk in chunks]
    if decoding:
        batches.merge([batch.id for batch in decoding])
    batch_id = decoding[0].id if decoding else new_batch_id
    batch = batches.join(batch_id, {chunk.request_id for chunk in chunks})
    placed = tuple(Chunk(row, chunk.start, chunk.end) for row, chunk in zip(chunk_rows, chunks, strict=True))
    step_input = _lay_out(rows, limits, decode_rows, slots_R, placed)
    last = [chunk.last for chunk in chunks]
    ends = _ends(len(decode_rows), placed)
    tokens = list(range(len(decode_rows))) + [end - 1 for end, is_last in zip(ends, last, strict=True) if is_last]
    tokens += [0] * max(0, limits.min_rows - len(tokens))
    return PreparedStep(
        batch,
        step_input,
        decode_ids + [chunk.request_id for chunk in chunks if chunk.last],
        decode_rows + [row for row, is_last in zip(chunk_rows, last, strict=True) if is_last],
        torch.tensor(tokens, dtype=torch.int64, device=rows.device),
    )


def _check(
    batches: Batches, limits: Limits, decoding: list[StepBatch], slots_R: Tensor, chunks: list[PromptChunk]
) -> list[int]:
    """The decoding requests in order. StepError before anything is changed."""
    for batch in decoding:
        batches.take(batch.id, batch.request_ids)
    decode_ids = [request_id for batch in decoding for request_id in batch.request_ids]
    if len(decode_ids) != len(slots_R):
        raise StepError(f"{len(decode_ids)} rows came with {len(slots_R)} slots")
    if not decode_ids and not chunks:
        raise StepError("a step must carry at least one row or chunk")
    if not _within(slots_R, limits.slots):
        raise StepError(f"the rows came with a slot that is not one of the {limits.slots}")
    for request_id in decode_ids:
        _check_room(batches.rows, request_id, batches.rows.known(request_id))
    for chunk in chunks:
        _check_chunk(batches.rows, limits, chunk)
    return decode_ids


def _check_chunk(rows: Rows, limits: Limits, chunk: PromptChunk) -> None:
    known = rows.known(chunk.request_id) if chunk.ids is None else len(chunk.ids)
    if not 0 <= chunk.start < chunk.end <= known:
        raise StepError(f"request {chunk.request_id}: {known} tokens have no chunk {chunk.start}:{chunk.end}")
    if chunk.ids is not None and not _within(chunk.ids, limits.vocab_size):
        raise StepError(f"request {chunk.request_id}: an id is not one of the {limits.vocab_size} of the vocabulary")
    if chunk.slots is not None and not _within(chunk.slots, limits.slots):
        raise StepError(f"request {chunk.request_id}: a slot is not one of the {limits.slots}")
    if chunk.last:
        _check_room(rows, chunk.request_id, known)


def _check_room(rows: Rows, request_id: int, known: int) -> None:
    if known >= rows.length:
        raise StepError(f"request {request_id}: no room for another token after {known} of {rows.length}")


def _within(values: Tensor, end: int) -> bool:
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) < end)


def _ends(first: int, chunks: tuple[Chunk, ...]) -> list[int]:
    """Where each chunk ends among the T tokens."""
    ends = []
    for chunk in chunks:
        first += chunk.end - chunk.start
        ends.append(first)
    return ends


def _lay_out(
    rows: Rows, limits: Limits, decode_rows: list[int], slots_R: Tensor, chunks: tuple[Chunk, ...]
) -> StepInput:
    device = rows.device
    decode_rows_R = torch.tensor(decode_rows, dtype=torch.int64, device=device)
    rows.append_slots(decode_rows_R, slots_R.to(device))
    lengths_R = rows.lengths[decode_rows_R]
    newest_R = lengths_R - 1
    ids = [rows.history[decode_rows_R, newest_R], *(rows.history[c.row, c.start : c.end] for c in chunks)]
    slots = [rows.table[decode_rows_R, newest_R], *(rows.table[c.row, c.start : c.end] for c in chunks)]
    positions = [newest_R, *(torch.arange(c.start, c.end, device=device) for c in chunks)]
    padding = max(0, limits.min_rows - sum(map(len, positions)))
    if padding:
        zeros = torch.zeros(padding, dtype=torch.int32, device=device)
        ids.append(zeros)
        positions.append(zeros.long())
        slots.append(torch.full_like(zeros, limits.slots))
    return StepInput(
        torch.cat(ids).long(),
        torch.cat(positions),
        torch.cat(slots).long(),
        rows.table,
        decode_rows_R,
        lengths_R,
        chunks,
    )
