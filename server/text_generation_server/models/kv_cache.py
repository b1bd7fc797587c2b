"""The cache that holds the keys and values of all tokens: one tensor per layer, with one slot per token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_server.device.arena import zeros
from text_generation_server.kernels.interface import KvLayer

# Types of cache numbers that need a scale for every slot and head.
SCALED = (torch.int8, torch.float8_e4m3fn)
SCALE = torch.float32
# Makes a tensor of a cache: of a shape and a type, on a device.
MakeTensor = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]


@dataclass(frozen=True, slots=True)
class KvShape:
    """What this rank stores of one token in one layer: `vectors` keys and values of `size` numbers each."""

    vectors: int
    size: int


def bytes_per_slot(layers: Sequence[KvShape], dtype: torch.dtype) -> int:
    """Bytes of one slot in all layers. `dtype`, here and below, is the type of the cache's numbers."""
    scale = SCALE.itemsize if dtype in SCALED else 0
    return sum(layer.vectors * (layer.size * dtype.itemsize + scale) for layer in layers)


def make_kv_cache(
    layers: Sequence[KvShape], slots: int, dtype: torch.dtype, device: torch.device, make: MakeTensor = zeros
) -> list[KvLayer]:
    """A cache of `slots` slots in each layer, and one extra slot for the tokens of padding."""
    cache = []
    for layer in layers:
        shape = (slots + 1, layer.vectors, layer.size)
        heads = make(shape, dtype, device)
        scales = make(shape[:2], SCALE, device) if dtype in SCALED else None
        cache.append(KvLayer(heads, scales))
    return cache
