"""Reads the linear layers of a quantized checkpoint from its files."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from text_generation_common.errors import ModelError
from text_generation_common.models.quantized_layers import QuantizedLayers
from text_generation_common.models.tensors import LinearSize, Shape
from text_generation_common.quantized.tensors.reading import read_layer
from text_generation_common.quantized.values import Weight
from text_generation_server.models.loading import Files


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """The `PackedLayers` of a checkpoint. `tensors` comes before `weight`, for each layer."""

    layers: QuantizedLayers
    files: Files
    _sizes: dict[str, LinearSize] = field(default_factory=dict)

    def tensors(self, layer: str, size: LinearSize) -> Mapping[str, Shape] | None:
        self._sizes[layer] = size
        return self.layers.tensors(layer, size)

    def weight(self, layer: str) -> Weight | None:
        scheme, size = self.layers.scheme(layer), self._sizes[layer]
        if scheme is None:
            return None
        if not size.has_bias:
            self._check_no_bias(f"{layer}.bias")
        return read_layer(scheme, layer, (size.outputs, size.inputs), self.files.describe, self.files.get)

    def _check_no_bias(self, name: str) -> None:
        if self.files.describe(name) is not None and self.files.get(name).any():
            raise ModelError(
                f"the weights files have a tensor {name} with numbers other than 0, and this model has no such bias: do"
                " the weights belong to this config.json?"
            )
