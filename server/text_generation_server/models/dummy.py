"""Random weights with the shapes that config.json gives, made on the device, for measurements."""

from zlib import crc32

import torch
from torch import Tensor

from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.tensors import shapes

DEVIATION = 0.02


class DummyFiles:
    """Replaces the weights files of a model. One name and one slice always give the same numbers on the same kind of
    device. The numbers of a slice differ from those of the same part of the whole tensor.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.bytes_read = 0  # always 0: no file is read
        self._device = device
        self._dtype = dtype
        self._shapes = shapes(config)

    @property
    def names(self) -> list[str]:
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def get(self, name: str) -> Tensor:
        return self._make(name, self._shapes[name], name)

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = self._shapes[name]
        return self._make(name, (*shape[:dim], stop - start, *shape[dim + 1 :]), f"{name} {dim} {start}")

    def _make(self, name: str, shape: tuple[int, ...], seed: str) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1)
        return tensor.normal_(std=DEVIATION, generator=torch.Generator(self._device).manual_seed(crc32(seed.encode())))
