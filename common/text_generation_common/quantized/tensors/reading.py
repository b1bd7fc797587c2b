"""Reads one layer of a quantized checkpoint: its headers are checked, then its tensors are turned into a value."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from text_generation_common.quantized.layout import WEIGHT_SHAPE, Find, check_layer
from text_generation_common.quantized.scheme import Packing, Scheme
from text_generation_common.quantized.tensors.bitsandbytes import read_bnb4
from text_generation_common.quantized.tensors.checks import Layer
from text_generation_common.quantized.tensors.floats import read_fp4, read_fp8, read_mxfp4
from text_generation_common.quantized.tensors.integers import read_awq, read_bnb8, read_gptq, read_int8, read_packed
from text_generation_common.quantized.values import Weight

READERS: Mapping[Packing, Callable[[Layer, Scheme], Weight]] = {
    Packing.gptq: read_gptq,
    Packing.gptq_v2: read_gptq,
    Packing.awq: read_awq,
    Packing.packed: read_packed,
    Packing.int8: read_int8,
    Packing.fp8: read_fp8,
    Packing.bnb4: read_bnb4,
    Packing.bnb8: read_bnb8,
    Packing.mxfp4: read_mxfp4,
    Packing.mxfp4_packed: read_fp4,
    Packing.nvfp4: read_fp4,
    Packing.nvfp4_modelopt: read_fp4,
}


def read_layer(scheme: Scheme, layer: str, shape: tuple[int, ...], find: Find, get: Callable[[str], Tensor]) -> Weight:
    """The weight [N, K] of a layer, or [E, N, K] of experts. `find` gives a tensor's description by its name, and `get`
    the tensor. WeightsError if the tensors contradict the scheme, the shape, or each other."""
    names = check_layer(scheme, layer, shape, find)
    return READERS[scheme.packing](Layer(layer, shape, names, get), scheme)


def read_expert(
    scheme: Scheme, layer: str, shape: tuple[int, ...], find: Find, *, get_slice: Callable[[str, int], Tensor],
    expert: int,
) -> Weight:  # fmt: skip
    """The weight [N, K] of an expert, of a layer whose tensors have those of E experts. `shape`: [E, N, K]. `get_slice`
    gives a part of a tensor by its name and the number in its first dimension."""
    names = check_layer(scheme, layer, shape, find)

    def get(name: str) -> Tensor:
        if name == names.get(WEIGHT_SHAPE):  # [E, N, K]
            return torch.cat([get_slice(name, dim).reshape(1) for dim in (1, 2)])
        return get_slice(name, expert)

    return READERS[scheme.packing](Layer(f"expert {expert} of {layer}", shape[1:], names, get), scheme)
