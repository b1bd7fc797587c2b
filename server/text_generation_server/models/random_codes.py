"""Random codes, for --load-format dummy of a quantized checkpoint."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from zlib import crc32

import torch
from torch import Tensor

from text_generation_common.models.tensors import LinearSize, Shape
from text_generation_common.quantized.layout import holds
from text_generation_common.quantized.scheme import Description, Packing, Scheme
from text_generation_common.quantized.tensors.floats import E2M1
from text_generation_common.quantized.values import Fp8, Groups, Int4, Int8, Table4, Weight

DEVIATION = 0.02  # standard deviation of weights, about
OF_BYTES = frozenset({Packing.int8, Packing.bnb8})
TABLES: Mapping[Packing, tuple[float, ...]] = {
    Packing.bnb4: tuple(step / 7.5 - 1 for step in range(16)),
    **dict.fromkeys((Packing.mxfp4, Packing.mxfp4_packed, Packing.nvfp4, Packing.nvfp4_modelopt), E2M1),
}
BNB4_BLOCK = 64


@dataclass(frozen=True, slots=True)
class RandomCodes:
    """The `PackedLayers` of a description without files: codes for all linear layers and experts that it does not name
    as dense. Embedding, head and routers are numbers. One name always gives the same codes on the same kind of
    device."""

    layers: Collection[str]  # besides experts of one tensor
    description: Description
    device: torch.device
    _sizes: dict[str, LinearSize] = field(default_factory=dict)

    def tensors(self, layer: str, size: LinearSize) -> Mapping[str, Shape] | None:
        if size.experts or layer in self.layers:
            self._sizes[layer] = size
        return {} if self.has(layer) else None

    def has(self, layer: str) -> bool:
        return self._scheme(layer) is not None

    def weight(self, layer: str) -> Weight | None:
        if (scheme := self._scheme(layer)) is None:
            return None
        size = self._sizes[_stored(layer)]
        return random_value(scheme, size.outputs, size.inputs, crc32(layer.encode()), self.device)

    def _scheme(self, layer: str) -> Scheme | None:
        size, scheme = self._sizes.get(_stored(layer)), self.description.scheme(_stored(layer))
        return scheme if size is not None and scheme is not None and holds(scheme, size.shape) else None


def _stored(layer: str) -> str:
    """The layer that the files have, of one of its experts."""
    return layer.partition("[")[0]


def random_value(scheme: Scheme, outputs: int, inputs: int, seed: int, device: torch.device) -> Weight:
    """A weight in the form that `read_layer` gives for the scheme."""
    generator = torch.Generator(device).manual_seed(seed)

    def codes(width: int) -> Tensor:
        return torch.randint(0, 256, (outputs, width), dtype=torch.uint8, device=device, generator=generator)

    def groups(size: int, deviation: float, dtype: torch.dtype) -> Groups:
        count = -(-inputs // size)
        scales = torch.full((outputs, count), DEVIATION / deviation, device=device, dtype=dtype)
        has_zeros = not scheme.symmetric and dtype is torch.float16
        return Groups(size, scales, torch.full_like(scales, 8, dtype=torch.int8) if has_zeros else None)

    if (table := TABLES.get(scheme.packing)) is not None:
        numbers = torch.tensor(table, device=device)
        size = scheme.group_size or BNB4_BLOCK
        return Table4(codes(inputs // 2), groups(size, float(numbers.std()), torch.float32), numbers)
    if scheme.packing is Packing.fp8:
        q = codes(inputs).bitwise_and_(0xBF)  # without the largest exponents: magnitudes below 2
        size = inputs if scheme.block is None else scheme.block[1]
        return Fp8(q.view(torch.float8_e4m3fn), groups(size, 0.6, torch.float32))
    size = scheme.group_size or inputs
    if scheme.bits == 8 or scheme.packing in OF_BYTES:
        return Int8(codes(inputs).view(torch.int8), groups(size, 74.0, torch.float32))
    return Int4(codes(inputs // 2), groups(size, 4.6, torch.float16))
