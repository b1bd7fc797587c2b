"""Reads the weights of one rank: from every tensor only the part that the rank needs."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from text_generation_common import faults
from text_generation_server.layers.linear import LinearOp, RowLinear, make_linear
from text_generation_server.layers.weights import WeightFormat, dense
from text_generation_server.platforms import Platform


class Files(Protocol):
    """A source of a model's tensors, on any device and of any type; for the methods see weights.files."""

    bytes_read: int

    @property
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...] | None: ...

    def get(self, name: str) -> Tensor: ...

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor: ...


class Loader:
    """Loads tensors onto the device, in the model's type. Reports progress after each tensor."""

    def __init__(
        self,
        files: Files,
        platform: Platform,
        dtype: torch.dtype,
        on_tensor: Callable[[], None],
        weight_format: WeightFormat = dense,
    ) -> None:
        """`weight_format` is used for linear layers. Embedding and head are dense."""
        self.num_tensors = 0
        self.dtype = dtype
        self._files = files
        self._platform = platform
        self._on_tensor = on_tensor
        self._weight_format = weight_format
        self._half = max(1, len(files.names) // 2)

    def has(self, name: str) -> bool:
        return self._files.shape(name) is not None

    def whole(self, name: str) -> Tensor:
        return self._place(self._files.get(name))

    def rows(self, name: str, part: range) -> Tensor:
        """Loads the `part` of the first dimension: some outputs of a weight, or a piece of a bias."""
        return self._place(self._files.get_slice(name, 0, part.start, part.stop))

    def columns(self, name: str, part: range) -> Tensor:
        """Loads the `part` of the second dimension: some inputs of a weight."""
        # Copied, because the slice is a view of the mapped file, and each of its rows would keep whole pages in use.
        return self._place(self._files.get_slice(name, 1, part.start, part.stop)).contiguous()

    def fused(self, parts: dict[str, range], has_bias: bool, gated: bool = False) -> LinearOp:
        """A layer that computes several layers with the same input as one product. Of each it has this rank's part of
        the outputs.
        """
        weight = torch.cat([self.rows(f"{name}.weight", part) for name, part in parts.items()])
        bias = torch.cat([self.rows(f"{name}.bias", part) for name, part in parts.items()]) if has_bias else None
        return make_linear(self._platform.kernels, self._weight_format(weight), bias, gated=gated)

    def row_split(self, name: str, part: range, has_bias: bool) -> RowLinear:
        """A layer with this rank's part of its inputs. Only rank 0 adds the bias."""
        platform = self._platform
        bias = self.whole(f"{name}.bias") if has_bias and platform.group.rank == 0 else None
        weight = self._weight_format(self.columns(f"{name}.weight", part))
        return RowLinear(make_linear(platform.kernels, weight, bias), platform.group)

    def _place(self, tensor: Tensor) -> Tensor:
        self.num_tensors += 1
        self._on_tensor()
        if self.num_tensors == self._half:
            faults.point("shard.load")
        return tensor.to(device=self._platform.device, dtype=self.dtype)
