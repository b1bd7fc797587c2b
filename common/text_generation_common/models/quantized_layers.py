"""The layers of a quantized checkpoint, experts and embedding included: which tensors of the files are theirs, and what
they take in memory. Reads settings and headers, and no tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from text_generation_common.errors import ModelError, WeightsError
from text_generation_common.gguf.container import is_gguf, read_header
from text_generation_common.gguf.types import BY_NAME, DENSE
from text_generation_common.models.config import config_fields, text_fields
from text_generation_common.models.tensors import LinearSize, Shape
from text_generation_common.quantized.layout import Find, check_layer, find_scheme, holds
from text_generation_common.quantized.methods import describe
from text_generation_common.quantized.scheme import Description, Scheme
from text_generation_common.quantized.sizes import code_bytes


def no_tensor(name: str) -> None:
    """The `Find` of files whose headers are not known."""


@dataclass(frozen=True, slots=True)
class QuantizedLayers:
    description: Description
    find: Find

    def scheme(self, layer: str) -> Scheme | None:
        """How a layer is stored; None if the files have its weight as numbers."""
        return find_scheme(self.description, layer, self.find)

    def tensors(self, layer: str, size: LinearSize) -> Mapping[str, Shape] | None:
        """As `PackedShapes`: the tensors of a layer's weight. WeightsError if they do not fit the settings. Old files
        of GPTQ have a bias of zeros in layers that have none."""
        scheme = self.scheme(layer)
        if scheme is None or not holds(scheme, size.shape):
            return None
        names = check_layer(scheme, layer, size.shape, self.find).values()
        found = {name: stored.shape for name in names if (stored := self.find(name)) is not None}
        has_zeros = not size.has_bias and self.find(bias := f"{layer}.bias") is not None
        return found | ({bias: (size.outputs,)} if has_zeros else {})

    def code_bytes(self, layer: str, size: LinearSize) -> int | None:
        """What the layer's weight takes in memory; None if it is kept as numbers."""
        scheme = self.scheme(layer)
        if scheme is None or not holds(scheme, size.shape):
            return None
        return code_bytes(scheme, layer, size.shape, self.find)


@dataclass(frozen=True, slots=True)
class BlockLayers:
    """The layers of a GGUF file, each of which says itself how it is stored."""

    find: Find
    description: Description = field(default_factory=lambda: Description("gguf", None))

    def tensors(self, layer: str, size: LinearSize) -> Mapping[str, Shape] | None:
        """As `PackedShapes`."""
        return None if self.type_of(layer) is None else {f"{layer}.weight": size.shape}

    def type_of(self, layer: str) -> str | None:
        """The type of a layer's blocks; None if the file has its weight as numbers."""
        stored = self.find(f"{layer}.weight")
        return None if stored is None or stored.type in DENSE else stored.type

    def code_bytes(self, layer: str, size: LinearSize) -> int | None:
        """What the layer's weight takes in memory at least, as it is repacked. GPUs read codes of 2, 5 and 6 bits
        as 8 bits, which take more."""
        if (name := self.type_of(layer)) is None:
            return None
        return math.prod(size.shape[:-1]) * BY_NAME[name].kept_bytes(size.inputs)


AnyLayers = QuantizedLayers | BlockLayers


def quantized_layers(folder: Path, find: Find) -> AnyLayers | None:
    """The layers of the model in a folder; None if none are quantized."""
    if is_gguf(folder):
        return BlockLayers(find) if _has_blocks(folder) else None
    description = describe(folder, text_fields(config_fields(folder)[0]).raw)
    return None if description is None else QuantizedLayers(description, find)


def _has_blocks(path: Path) -> bool:
    try:
        return any(tensor.type not in DENSE for tensor in read_header(path).tensors.values())
    except WeightsError as error:
        raise ModelError(str(error)) from None
