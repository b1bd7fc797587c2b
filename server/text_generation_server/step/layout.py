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
from text_generation_server.step.preparation import Int32s, PreparedStep
from text_generation_server.step.rows import Rows


class DecodeInputs:
    """Fixed tensors on the device from which decode steps read their rows and the slots of the rows' newest tokens."""

    def __init__(self, most: int, rows: Rows, padding_slot: int) -> None:
        """Allocates memory for steps of up to `most` rows, padding included."""
        self._rows = rows
        self._padding_slot = padding_slot
        width = -(-most // ALIGNED_WORDS) * ALIGNED_WORDS
        self._there = torch.zeros((2, width), dtype=torch.int32, device=rows.device)

    def fill(self, rows_R: Int32s, slots_R: Int32s, size: int) -> None:
        """Writes the rows `rows_R` and their slots into the fixed tensors, padded to `size` rows."""
        count = len(rows_R)
        host = host_words(self._there.numel(), self._rows.device).view_as(self._there)
        words = host.numpy()
        words[0, :count], words[0, count:size] = rows_R, self._rows.padding
        words[1, :count], words[1, count:size] = slots_R, self._padding_slot
        self._there.copy_(host, non_blocking=True)

    def step_input(self, kernels: Kernels, size: int, tokens: int) -> StepInput:
        """The input of a step of the first `size` rows, padded to at least `tokens` tokens. Uses the device only, not
        the host.
        """
        rows, (rows_R, slots_R) = self._rows, self._there[:, :size]
        ids, positions, lengths = kernels.place(rows_R, slots_R, rows.history, rows.table, rows.lengths)
        if (missing := tokens - size) > 0:
            ids, positions = pad(ids, (0, missing)), pad(positions, (0, missing))
            slots_R = pad(slots_R, (0, missing), value=self._padding_slot)
        return StepInput(ids, positions, slots_R, rows.table, rows_R, lengths, None)

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
    decoding = len(step.decode.rows)
    known_R = rows.known[step.decode.rows_R]
    runs = [(row, int(known) - 1, int(known)) for row, known in zip(step.decode.rows, known_R, strict=True)]
    runs += [(chunk.row, chunk.start, chunk.end) for chunk in step.chunks]
    rows_C, starts_C, ends_C = np.array(runs, dtype=np.int32).T
    lengths_C = ends_C - starts_C
    offsets = np.concatenate([[0], np.cumsum(lengths_C)]).astype(np.int32)
    count = int(offsets[-1])
    missing = max(0, min_tokens - count)
    rows_T = np.append(np.repeat(rows_C, lengths_C), np.full(missing, rows.padding, dtype=np.int32))
    positions_T = np.append(np.arange(count) - np.repeat(offsets[:-1] - starts_C, lengths_C), np.zeros(missing))
    there = send(
        [
            step.decode.rows_R, step.slots_R, rows_C[decoding:], starts_C[decoding:], offsets[decoding:],
            rows_T, positions_T.astype(np.int32), _sampled_tokens(step, offsets, min_tokens), step.sampled.rows_R,
        ],
        rows.device,
    )  # fmt: skip
    decode_rows, slots, chunk_rows, starts, ends, token_rows, positions, sampled_tokens, sampled_rows = there
    lengths = decode_rows
    if decoding:
        _, _, lengths = kernels.place(decode_rows, slots, rows.history, rows.table, rows.lengths)
    segments = Segments(chunk_rows, starts, ends, count - decoding)
    ids, slots = rows.history[token_rows, positions], rows.table[token_rows, positions]
    return MixedInput(
        StepInput(ids, positions, slots, rows.table, decode_rows, lengths, segments), sampled_tokens, sampled_rows
    )


def _sampled_tokens(step: PreparedStep, offsets: Int32s, min_tokens: int) -> Int32s:
    decoding = len(step.decode.rows)
    chunk_ends = [int(end) - 1 for end, c in zip(offsets[decoding + 1 :], step.chunks, strict=True) if c.last]
    tokens = [*range(decoding), *chunk_ends]
    return np.array(tokens + [0] * max(0, min_tokens - len(tokens)), dtype=np.int32)
