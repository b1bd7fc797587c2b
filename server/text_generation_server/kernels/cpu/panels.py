"""Copies weights, and what belongs to them, into the panels of csrc/README.md."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_common.quantized.tensors.stored import CodesInFile, CodesOfOutputs, Columns, Runs, converted
from text_generation_server.device.arena import SharedPages
from text_generation_server.kernels.cpu.library import Library

PANEL = 16
BLOCK = 2 * PANEL  # outputs and inputs must be multiples of this, because the matrix product takes pairs of panels
WORD_BYTES = 4


def places(outputs: int, gated: bool) -> Tensor:
    """The output at each place of pairs of panels, and -1 at those that have none. If gated, panels of gates and of the
    matching ups take turns."""
    found = torch.arange(outputs, dtype=torch.int32)
    if gated:
        halves = F.pad(found.view(2, -1), (0, -(outputs // 2) % PANEL), value=-1)
        found = halves.view(2, -1, PANEL).transpose(0, 1).flatten()
    return F.pad(found, (0, -len(found) % BLOCK), value=-1)


def in_panels(
    library: Library, threads: int, pages: SharedPages, numbers: Tensor, places: Tensor, *, width: int = BLOCK,
    unit: int = 0, sorts: bool = False,
) -> Tensor:  # fmt: skip
    """[N, M] as [places / width, units, width], and 0 where no output is. A unit is one number, or some neighbours with
    `unit` bytes together, and a further dimension is theirs then. `sorts`: codes of 4 bits become words of 8 inputs.
    CodesInFile are read where they lie."""
    size = numbers.element_size()
    unit = unit or size
    units, each = numbers.shape[1] * size // unit, unit // size
    shape = (len(places) // width, units, width, *((each,) if each > 1 else ()))
    packed = pages.empty(shape, numbers.dtype)
    parts = numbers.parts if isinstance(numbers, CodesInFile) else []
    if parts and isinstance(parts[0].order, Columns) and sorts:
        _pack_columns(library, threads, parts, places=places, packed=packed)
        return packed
    order = parts[0].order if parts else None
    if isinstance(order, Runs):
        rows = torch.cat([part.at_rows(_rows(part.memory)) for part in parts])
    else:
        numbers, order = converted(numbers).contiguous(), Runs()
        rows = _rows(numbers)
    library.call(
        threads, "pack_panels", rows=_at(places, rows), starts=torch.tensor(order.starts, dtype=torch.int32),
        run=order.run // unit or units, spread=int(order.spread != 0), swaps=int(order.swaps), unit=unit, units=units,
        panels=shape[0], width=width, sorts=int(sorts), packed=packed,
    )  # fmt: skip
    return packed


def _pack_columns(
    library: Library, threads: int, parts: Sequence[CodesOfOutputs], *, places: Tensor, packed: Tensor
) -> None:
    order = parts[0].order
    assert isinstance(order, Columns)
    rows, shifts, strides = [], [], []
    for part in parts:
        words, places_of_word = part.memory.t(), torch.tensor(order.places, dtype=torch.int32)
        rows.append(part.at_rows(_rows(words).repeat_interleave(len(order.places))))
        shifts.append(part.at_rows(places_of_word.repeat(len(words))))
        strides.append(torch.full((part.shape[0],), words.stride(1) * WORD_BYTES))
    library.call(
        threads, "pack_columns", rows=_at(places, torch.cat(rows)), shifts=_at(places, torch.cat(shifts)),
        strides=_at(places, torch.cat(strides)), order=order.inputs, in_word=order.of_word, units=packed.shape[1],
        panels=packed.shape[0], packed=packed,
    )  # fmt: skip


def _rows(numbers: Tensor) -> Tensor:
    """The addresses of rows."""
    return numbers.data_ptr() + torch.arange(len(numbers)) * (numbers.stride(0) * numbers.element_size())


def _at(places: Tensor, values: Tensor) -> Tensor:
    """Values of outputs at their places, and 0 where no output is."""
    return values[places.clamp(min=0)].masked_fill_(places < 0, 0)


def aligned(values_N: Tensor | None, places: Tensor) -> Tensor | None:
    """Scales or biases in float32, in the order of the panels, with zeros for outputs that are missing."""
    return None if values_N is None else _at(places, values_N.float())
