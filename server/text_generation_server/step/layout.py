"""Lays out a step's inputs on the device: one copy from the host; all else is gathered from the rows' tensors on the
device.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from text_generation_server.device.transfers import ALIGNED_WORDS, host_words, send
from text_generation_server.kernels.interface import Kernels, Segments
from text_generation_server.step.inputs import StepInput
from text_generation_server.step.preparation import PreparedStep
from text_generation_server.step.rows import NO_ADAPTER, Int32s, Rows

# Most chunks of a recorded mixed step: attention launches a program for each of them, whether the step has it or not.
MAX_CHUNKS = 16
# Most tokens of padding of a recorded mixed step. From about 160 tokens on a step's time grows with its tokens: more of
# them would take longer than the launch of each kernel by itself, which runs ahead of the device.
MAX_PADDING = 64
NO_NUMBERS = np.empty(0, dtype=np.int32)
NO_RUNS = np.zeros(1, dtype=np.int32)  # offsets of no runs


class DecodeInputs:
    """Fixed tensors on the device from which decode steps read their rows, the slots of the rows' newest tokens, and
    the rows' adapters."""

    def __init__(self, most: int, rows: Rows, padding_slot: int) -> None:
        """Allocates memory for steps of up to `most` rows, padding included."""
        self._rows = rows
        self._padding_slot = padding_slot
        width = -(-most // ALIGNED_WORDS) * ALIGNED_WORDS
        self._there = torch.zeros((3, width), dtype=torch.int32, device=rows.device)
        # A CPU has computed all earlier steps, so that the tensors themselves can be written.
        self._words = self._there.numpy() if rows.device.type == "cpu" else None

    def fill(self, rows_R: Int32s, slots_R: Int32s, size: int) -> None:
        """Writes the rows `rows_R` and their slots into the fixed tensors, padded to `size` rows."""
        if self._words is not None:
            self._write(self._words, rows_R, slots_R, size)
            return
        host = host_words(self._there.numel(), self._rows.device).view_as(self._there)
        self._write(host.numpy(), rows_R, slots_R, size)
        self._there.copy_(host, non_blocking=True)

    def _write(self, words: Int32s, rows_R: Int32s, slots_R: Int32s, size: int) -> None:
        count = len(rows_R)
        words[0, :count], words[1, :count] = rows_R, slots_R
        if self._rows.adapter_slots:
            words[2, :count], words[2, count:size] = self._rows.adapters[rows_R], NO_ADAPTER
        if count < size:
            words[0, count:size], words[1, count:size] = self._rows.padding, self._padding_slot

    def step_input(self, kernels: Kernels, size: int, tokens: int, with_adapters: bool = False) -> StepInput:
        """The input of a step of the first `size` rows, padded to at least `tokens` tokens. Uses the device only, not
        the host.
        """
        rows, (rows_R, slots_R, _) = self._rows, self._there[:, :size]
        ids, positions, lengths = kernels.place(rows_R, slots_R, rows.history, rows.table, rows.lengths)
        if (missing := tokens - size) > 0:
            ids, positions = pad(ids, (0, missing)), pad(positions, (0, missing))
            slots_R = pad(slots_R, (0, missing), value=self._padding_slot)
        return StepInput(
            ids_T=ids,
            positions_T=positions,
            slots_T=slots_R,
            table=rows.table,
            rows_R=rows_R,
            lengths_R=lengths,
            segments=None,
            adapters_T=self.adapters_T(size, tokens, with_adapters),
        )

    def adapters_T(self, size: int, tokens: int, with_adapters: bool) -> Tensor | None:
        """The adapters of the tokens of `step_input`."""
        if not with_adapters:
            return None
        adapters_R, missing = self._there[2, :size], tokens - size
        return pad(adapters_R, (0, missing), value=NO_ADAPTER) if missing > 0 else adapters_R

    def rows_R(self, count: int) -> Tensor:
        return self._there[0, :count]


@dataclass(frozen=True, slots=True)
class MixedInput:
    """The input of a step with prompt chunks."""

    input: StepInput
    sampled_tokens: Tensor  # int32: indices of the tokens after which a token is sampled; padded to `min_tokens`
    sampled_rows_R: Tensor  # int32


def lay_out(step: PreparedStep, rows: Rows, kernels: Kernels, min_tokens: int) -> MixedInput:
    """The input of a step with chunks: decode rows first, then the chunks, then padding to at least `min_tokens`."""
    arrays = _mixed_numbers(step, rows, min_tokens)
    if step.has_adapters:
        arrays.append(_adapters_of_tokens(step, max(step.tokens, min_tokens)))
    sampled_tokens, sampled_rows, *numbers = send(arrays, rows.device)
    adapters_T = numbers.pop() if step.has_adapters else None
    step_input = _mixed_step_input(numbers, rows, kernels, step.tokens - len(step.decode.rows), adapters_T)
    return MixedInput(step_input, sampled_tokens, sampled_rows)


class MixedInputs:
    """Fixed tensors on the device from which recorded mixed steps read their rows, slots and chunks."""

    def __init__(self, most: int, rows: Rows, padding_slot: int) -> None:
        """Makes room for `most` tokens in a step, padding included."""
        self._rows = rows
        # What follows the numbers of a step in each array, but the last array.
        self._padding = (0, rows.padding, rows.padding, padding_slot, 0, rows.padding, 0, rows.padding, 0)
        width = -(-max(most, MAX_CHUNKS + 1) // ALIGNED_WORDS) * ALIGNED_WORDS
        self._there = torch.zeros((len(self._padding) + 1, width), dtype=torch.int32, device=rows.device)

    def fits(self, step: PreparedStep, size: int) -> bool:
        """Whether the step is worth being padded to `size` tokens, and has few enough chunks."""
        return size - step.tokens <= MAX_PADDING and len(step.chunks) <= MAX_CHUNKS

    def fill(self, step: PreparedStep | None, min_tokens: int) -> None:
        """Writes a step of at most MAX_CHUNKS chunks; None: padding alone."""
        arrays = [*[NO_NUMBERS] * len(self._padding), NO_RUNS]
        if step is not None:
            arrays = _mixed_numbers(step, self._rows, min_tokens)
        host = host_words(self._there.numel(), self._rows.device).view_as(self._there)
        paddings = (*self._padding, arrays[-1][-1])  # padding of the chunks: empty runs
        for words, array, padding in zip(host.numpy(), arrays, paddings, strict=True):
            words[: len(array)], words[len(array) :] = array, padding
        self._there.copy_(host, non_blocking=True)

    def step_input(self, kernels: Kernels, size: int) -> StepInput:
        """Input of a step of `size` tokens, padding included. Runs on the device only."""
        chunks = [array[:MAX_CHUNKS] for array in self._there[7:9]]
        numbers = [*self._there[2:7, :size], *chunks, self._there[9, : MAX_CHUNKS + 1]]
        return _mixed_step_input(numbers, self._rows, kernels, size)

    def sampled(self, count: int, min_tokens: int) -> tuple[Tensor, Tensor]:
        """The tokens after which a token is sampled, padded to `min_tokens`, and their rows."""
        return self._there[0, : max(count, min_tokens)], self._there[1, :count]


def _mixed_numbers(step: PreparedStep, rows: Rows, min_tokens: int) -> list[Int32s]:
    """What the host knows of a mixed step: sampled tokens and their rows; rows, slots and lengths of the decode rows;
    row and position of each token; rows and first positions of the chunks, and their offsets."""
    decoding = len(step.decode.rows)
    known_R = rows.known[step.decode.rows_R].astype(np.int32)
    chunks = np.array([(chunk.row, chunk.start, chunk.end) for chunk in step.chunks], dtype=np.int32)
    chunk_rows, chunk_starts, chunk_ends = chunks.T
    rows_C = np.append(step.decode.rows_R, chunk_rows)  # runs: a token of each decode row, then the chunks
    starts_C = np.append(known_R - 1, chunk_starts)
    lengths_C = np.append(known_R, chunk_ends) - starts_C
    offsets = np.append(0, np.cumsum(lengths_C)).astype(np.int32)
    missing = max(0, min_tokens - step.tokens)
    rows_T = np.append(np.repeat(rows_C, lengths_C), np.full(missing, rows.padding, dtype=np.int32))
    positions_T = np.append(np.arange(step.tokens) - np.repeat(offsets[:-1] - starts_C, lengths_C), np.zeros(missing))
    ends_of_prompts = offsets[decoding + 1 :][[chunk.last for chunk in step.chunks]] - 1
    sampled_tokens = np.append(np.arange(decoding, dtype=np.int32), ends_of_prompts)
    sampled_tokens = np.pad(sampled_tokens, (0, max(0, min_tokens - len(sampled_tokens))))
    return [
        sampled_tokens, step.sampled.rows_R, step.decode.rows_R, step.slots_R, known_R, rows_T,
        positions_T.astype(np.int32), chunk_rows, chunk_starts, offsets[decoding:],
    ]  # fmt: skip


def _adapters_of_tokens(step: PreparedStep, tokens: int) -> Int32s:
    found = np.full(tokens, NO_ADAPTER, dtype=np.int32)
    first = len(step.decode.rows)
    if step.decode.adapters_R is not None:
        found[:first] = step.decode.adapters_R
    for chunk in step.chunks:
        last = first + chunk.end - chunk.start
        found[first:last], first = chunk.adapter, last
    return found


def _mixed_step_input(
    numbers: list[Tensor], rows: Rows, kernels: Kernels, chunk_tokens: int, adapters_T: Tensor | None = None
) -> StepInput:
    """`numbers` are those of `_mixed_numbers` on the device, without the sampled tokens and rows."""
    decode_rows, decode_slots, lengths, token_rows, positions, chunk_rows, starts, offsets = numbers
    if len(decode_rows):
        kernels.place(decode_rows, decode_slots, rows.history, rows.table, rows.lengths)
    ids, slots = rows.history[token_rows, positions], rows.table[token_rows, positions]
    segments = Segments(chunk_rows, starts, offsets, chunk_tokens)
    return StepInput(
        ids_T=ids,
        positions_T=positions,
        slots_T=slots,
        table=rows.table,
        rows_R=decode_rows,
        lengths_R=lengths,
        segments=segments,
        adapters_T=adapters_T,
    )
