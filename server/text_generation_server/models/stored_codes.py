"""Reads the quantized layers of a checkpoint from its files."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from text_generation_common.errors import ModelError
from text_generation_common.models.quantized_layers import AnyLayers, BlockLayers, QuantizedLayers
from text_generation_common.models.tensors import LinearSize, Shape
from text_generation_common.quantized.tensors.blocks import read_blocks
from text_generation_common.quantized.tensors.reading import read_expert, read_layer
from text_generation_common.quantized.values import Weight
from text_generation_server.models.loading import Files, PackedLayers


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """The `PackedLayers` of a checkpoint. `tensors` comes before `weight`, for each layer that may be asked for."""

    layers: QuantizedLayers
    files: Files
    _sizes: dict[str, LinearSize] = field(default_factory=dict)

    def tensors(self, layer: str, size: LinearSize) -> Mapping[str, Shape] | None:
        self._sizes[layer] = size
        return self.layers.tensors(layer, size)

    def has(self, layer: str) -> bool:
        layer = layer.partition("[")[0]
        return layer in self._sizes and self.layers.scheme(layer) is not None

    def weight(self, layer: str) -> Weight | None:
        layer, _, expert = layer.partition("[")
        scheme, size = self.layers.scheme(layer), self._sizes[layer]
        if scheme is None:
            return None
        if not size.has_bias:
            self._check_no_bias(f"{layer}.bias")
        find, files = self.files.describe, self.files
        if size.experts:
            number = int(expert.removesuffix("]"))
            return read_expert(scheme, layer, size.shape, find, get_slice=self._slice, expert=number)
        return read_layer(scheme, layer, size.shape, find, files.get)

    def _slice(self, name: str, number: int) -> Tensor:
        return self.files.get_slice(name, 0, number, number + 1)[0]

    def _check_no_bias(self, name: str) -> None:
        if self.files.describe(name) is not None and self.files.get(name).any():
            raise ModelError(
                f"the weights files have a tensor {name} with numbers other than 0, and this model has no such bias: do"
                " the weights belong to this config.json?"
            )


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """The `PackedLayers` of a GGUF file."""

    layers: BlockLayers
    files: Files

    def tensors(self, layer: str, size: LinearSize) -> Mapping[str, Shape] | None:
        return self.layers.tensors(layer, size)

    def has(self, layer: str) -> bool:
        return self.layers.type_of(layer.partition("[")[0]) is not None

    def weight(self, layer: str) -> Weight | None:
        kind = self.layers.type_of(layer.partition("[")[0])
        return None if kind is None else read_blocks(kind, self.files.get(f"{layer}.weight"), layer)


def packed_layers(layers: AnyLayers, files: Files) -> PackedLayers:
    return StoredBlocks(layers, files) if isinstance(layers, BlockLayers) else StoredCodes(layers, files)
