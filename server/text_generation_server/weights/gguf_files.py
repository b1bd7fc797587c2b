"""The tensors of a GGUF file, read from its mapping."""

import mmap
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from text_generation_common.errors import WeightsError
from text_generation_common.gguf.config import architecture_of
from text_generation_common.gguf.container import GgufTensor, is_gguf, read_header
from text_generation_common.gguf.tensors import model_tensors
from text_generation_common.gguf.types import BY_NAME, DENSE
from text_generation_common.weights.headers import Stored
from text_generation_server.weights.files import SafetensorsFiles

NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFiles:
    """The `Files` of a GGUF file. A tensor of blocks is uint8, with the bytes of a row in the place of its numbers;
    `describe` says its type and the shape of the numbers.

    Parts are mapped when the first of their tensors is read. Numbers are copies: a mapping that is alive would keep a
    replaced file. Blocks are views of the mapping, and a value's codes are until a kernel has packed them.
    """

    def __init__(self, path: Path) -> None:
        self.bytes_read = 0
        self._header = read_header(path)
        self._tensors = model_tensors(self._header)
        self._minus_one = architecture_of(self._header).plus_one
        self._maps: dict[int, mmap.mmap] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors)

    def describe(self, name: str) -> Stored | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else Stored(tensor.type, tensor.shape)

    def get(self, name: str) -> Tensor:
        tensor = self._find(name)
        return self._read(tensor, 0, tensor.size).view(self._stored_shape(tensor))

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Reads only the rows if `dim` is 0, and the whole tensor otherwise."""
        tensor = self._find(name)
        shape = tensor.shape
        if not (0 <= dim < len(shape) and 0 <= start <= stop <= shape[dim]):
            raise WeightsError(f"{name} has shape {list(shape)}: it has no slice {start}:{stop} along dimension {dim}")
        if dim:
            return self.get(name).narrow(dim, start, stop - start)
        row = tensor.size // shape[0]
        part = self._read(tensor, start * row, (stop - start) * row)
        return part.view(stop - start, *self._stored_shape(tensor)[1:])

    def _find(self, name: str) -> GgufTensor:
        """`name[3].weight` is the part of expert 3."""
        layer, _, expert = name.removesuffix(".weight").partition("[")
        tensor = self._tensors.get(f"{layer}.weight" if expert else name)
        number = int(expert.removesuffix("]")) if expert else 0
        if tensor is None or (expert and not number < tensor.shape[0]):
            raise WeightsError(f"{self._header.path} has no tensor {name}: download it again")
        if not expert:
            return tensor
        size = tensor.size // tensor.shape[0]
        return replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + number * size, size=size)

    def _stored_shape(self, tensor: GgufTensor) -> tuple[int, ...]:
        if tensor.type in DENSE:
            return tensor.shape
        return *tensor.shape[:-1], BY_NAME[tensor.type].row_bytes(tensor.shape[-1])

    def _read(self, tensor: GgufTensor, start: int, count: int) -> Tensor:
        """Some bytes of a tensor, as its numbers or as bytes, in one dimension."""
        self.bytes_read += count
        kind, offset = NUMBERS.get(tensor.type, torch.uint8), tensor.offset + start
        if not count:
            return torch.empty(0, dtype=kind)
        data = torch.frombuffer(self._map(tensor.part), dtype=torch.uint8, count=count, offset=offset)
        numbers = data if kind == torch.uint8 else data.clone().view(kind)
        return numbers - 1 if self._minus_one and tensor.name.endswith("norm.weight") else numbers

    def _map(self, part: int) -> mmap.mmap:
        if part not in self._maps:
            with open(self._header.files[part], "rb") as file:
                self._maps[part] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # as torch asks
        return self._maps[part]


def open_files(path: Path) -> GgufFiles | SafetensorsFiles:
    """The tensors of a model. WeightsError if files are missing or broken."""
    return GgufFiles(path) if is_gguf(path) else SafetensorsFiles(path)
