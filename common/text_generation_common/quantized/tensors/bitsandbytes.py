"""Layers of bitsandbytes in 4 bits: nf4 and fp4, whose scales may be quantized themselves."""

import json
import math
from typing import Any

import torch
from torch import Tensor

from text_generation_common.quantized.scheme import Scheme
from text_generation_common.quantized.tensors.checks import Layer, broken
from text_generation_common.quantized.tensors.codes import CODES_AT_ONCE, by_outputs, halves_swapped
from text_generation_common.quantized.tensors.stored import CodesInFile, CodesOfOutputs, Runs
from text_generation_common.quantized.values import CodedScales, Groups, SharedNumbers, Table4, Weight

BLOCK_SIZES = frozenset(2**power for power in range(5, 13))
STATE = ".weight.quant_state.bitsandbytes__nf4"  # the ending of its part: fp4 files have another one


def read_bnb4(layer: Layer, scheme: Scheme) -> Weight:
    """Blocks lie along all rows, one after the other. Where they do not divide a row, groups of the value are parts of
    blocks."""
    state = _state(layer)
    block = _block_size(layer, state, "blocksize")
    size = math.gcd(block, layer.inputs)
    rows = layer[".weight"].reshape(layer.outputs, layer.inputs // 2)

    def read() -> Tensor:
        return by_outputs(layer.outputs, layer.inputs, lambda outputs: halves_swapped(rows[outputs]), CODES_AT_ONCE)

    q = CodesInFile([CodesOfOutputs((layer.outputs, layer.inputs // 2), rows, Runs(swaps=True), read)])
    return Table4(q, Groups(size, _scales(layer, state, block, size)), layer.finite(".weight.quant_map"))


def _state(layer: Layer) -> dict[str, Any]:
    try:
        state = json.loads(bytes(layer[STATE].tolist()))
    except (ValueError, RecursionError):
        raise broken(layer.name, f"{layer.names[STATE]} is not JSON") from None
    if not isinstance(state, dict) or state.get("shape") != [layer.outputs, layer.inputs]:
        raise broken(layer.name, f"{layer.names[STATE]} does not give the shape {[layer.outputs, layer.inputs]}")
    return state


def _block_size(layer: Layer, state: dict[str, Any], name: str) -> int:
    size = state.get(name)
    if not isinstance(size, int) or size not in BLOCK_SIZES:
        raise broken(layer.name, f"{layer.names[STATE]} gives no {name} that is a power of 2 from 32 to 4096")
    return size


def _scales(layer: Layer, state: dict[str, Any], block: int, size: int) -> Tensor | SharedNumbers | CodedScales:
    """Scales of groups of `size` inputs, which are parts of blocks."""
    stored, blocks = layer[".weight.absmax"], -(-layer.outputs * layer.inputs // block)
    if stored.shape != (blocks,):
        raise broken(layer.name, f"absmax has {len(stored)} numbers, and the weight {blocks} blocks")
    groups, run = layer.inputs // size, block // size
    starts = torch.arange(layer.outputs, dtype=torch.int32, device=stored.device).unsqueeze(1) * groups
    if stored.dtype is not torch.uint8:
        scales = SharedNumbers(layer.finite(".weight.absmax"), starts, groups, run)
        return scales.numbers.reshape(layer.outputs, groups) if run == 1 else scales
    nested = layer.find(".weight.nested_absmax"), layer.find(".weight.nested_quant_map")
    offset = state.get("nested_offset")
    if nested[0] is None or nested[1] is None or not isinstance(offset, float) or not math.isfinite(offset):
        raise broken(layer.name, "absmax is quantized, and nested_absmax, nested_quant_map or nested_offset is missing")
    factors, table = layer.finite(".weight.nested_absmax"), layer.finite(".weight.nested_quant_map")
    of_factor = _block_size(layer, state, "nested_blocksize")
    if factors.shape != (-(-blocks // of_factor),):
        raise broken(layer.name, f"nested_absmax has {len(factors)} numbers for {blocks} blocks")
    codes = stored.repeat_interleave(run)[: layer.outputs * groups].reshape(layer.outputs, groups)
    offsets = SharedNumbers(table.new_tensor([offset]), torch.zeros_like(starts), groups, groups)
    return CodedScales(codes, table, SharedNumbers(factors, starts, groups, run * of_factor), offsets)
