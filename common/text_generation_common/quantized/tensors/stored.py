"""Codes of a weight that still lie in a file, in the order that a format has. A kernel that packs them takes them from
there, without a copy in between; for all else they are the tensor that a value has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Runs:
    """Each output has a row of bytes, and codes of a run of inputs lie together."""

    starts: tuple[int, ...] = (0,)  # bits from an output's first byte to each run
    run: int = 0  # bytes that a run takes in the value's tensor. 0: all of an output
    # Bits of a code, where 8 bytes have the codes of 8 inputs at the same bits. 0: codes are neighbours.
    spread: int = 0
    swaps: bool = False  # whether the first of two codes of 4 bits is in the upper half of its byte


@dataclass(frozen=True, slots=True)
class Columns:
    """Words of 32 bits with codes of 4 bits, [words of an output, N / outputs of a word]."""

    places: tuple[int, ...]  # bits from a word's lowest one to the first code of each of its outputs
    of_word: int  # codes of an output in a word, which are neighbours: 1 or 8
    inputs: Tensor | None = field(default=None, compare=False)  # [K]: int32, the input of each code. None: in order


@dataclass(frozen=True, slots=True)
class CodesOfOutputs:
    """Codes of some outputs."""

    shape: tuple[int, int]  # that of the value's tensor
    memory: Tensor  # the file's tensor, of two dimensions
    order: Runs | Columns
    convert: Callable[[], Tensor]  # makes the value's tensor
    rows: Tensor | None = None  # int64: for each output, its number in the file plus 1; 0: zeros. None: all in order

    def at_rows(self, values: Tensor) -> Tensor:
        """Values of the file's outputs for those of these codes, and 0 for zeros."""
        if self.rows is None:
            return values
        return values[(self.rows - 1).clamp(min=0)].masked_fill_(self.rows.view(-1, *(1,) * (values.dim() - 1)) == 0, 0)


class CodesInFile(Tensor):
    """A tensor whose numbers are made whenever torch computes with them. There is no memory for them."""

    parts: Sequence[CodesOfOutputs]  # neighbouring outputs, whose codes are in the same order

    @staticmethod
    def __new__(cls, parts: Sequence[CodesOfOutputs], dtype: torch.dtype = torch.uint8) -> "CodesInFile":
        shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
        found = torch.empty(1, dtype=dtype).expand(shape).as_subclass(cls)
        found.parts = parts
        return found

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named, codes = named or {}, arguments[0]
        assert function is not Tensor.data_ptr, "stored codes have no memory"
        if function in ASKING or getattr(function, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                found = function(*arguments, **named)
            if not isinstance(found, Tensor):
                return found
        if function is Tensor.view and isinstance(arguments[1], torch.dtype) and arguments[1].itemsize == 1:
            return CodesInFile(codes.parts, arguments[1])
        if function is Tensor.to and named == {"device": codes.device, "dtype": codes.dtype}:
            return codes
        return function(*_converted(arguments), **{name: _converted(value) for name, value in named.items()})

    def on_rows(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        """What `change`, which moves rows, makes of the codes."""
        count = len(self)
        rows = change(torch.arange(1, count + 1).unsqueeze(1))
        if rows.dim() != 2 or len(self.parts) > 1:
            return change(converted(self).view(torch.uint8)).view(self.dtype)
        part, rows = self.parts[0], rows.flatten()
        if len(rows) == count and torch.equal(rows, torch.arange(1, count + 1)):
            return self
        rows = rows if part.rows is None else replace(part, rows=rows).at_rows(part.rows)
        return CodesInFile([replace(part, shape=(len(rows), part.shape[1]), rows=rows)], self.dtype)


ASKING = (Tensor.dim, Tensor.size, Tensor.numel, Tensor.element_size, Tensor.__len__)


def _converted(value: Any) -> Any:
    """The same with tensors in the place of stored codes."""
    if isinstance(value, list | tuple):
        return type(value)(map(_converted, value))
    return converted(value) if isinstance(value, CodesInFile) else value


def converted(tensor: Tensor) -> Tensor:
    """The tensor with its numbers in memory."""
    if not isinstance(tensor, CodesInFile):
        return tensor
    parts = [part.view(torch.uint8) for part in tensors_of(tensor)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(tensor.dtype)


def tensors_of(tensor: Tensor) -> list[Tensor]:
    """Tensors of neighbouring outputs: one for each part of stored codes."""
    if not isinstance(tensor, CodesInFile):
        return [tensor]
    return [part.at_rows(part.convert().view(torch.uint8)).view(tensor.dtype) for part in tensor.parts]


def stored(numbers: Tensor) -> Tensor:
    """A tensor [N, numbers] of a file, whose rows are those of the value. Others are as they are."""
    if numbers.dim() != 2 or numbers.device.type != "cpu":
        return numbers
    return CodesInFile(
        [CodesOfOutputs((numbers.shape[0], numbers.shape[1]), numbers, Runs(), lambda: numbers)], numbers.dtype
    )


def stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    """The codes of the outputs of all tensors, where they lie, if their order is the same. Otherwise None."""
    parts = [part for tensor in tensors if isinstance(tensor, CodesInFile) for part in tensor.parts]
    if not all(isinstance(tensor, CodesInFile) and tensor.parts[0].order == parts[0].order for tensor in tensors):
        return None
    return CodesInFile(parts, tensors[0].dtype)
