"""Layers of floating-point numbers in 8 or 4 bits: fp8, MXFP4 and NVFP4."""

import torch
from torch import Tensor

from text_generation_common.quantized.scheme import Packing, Scheme
from text_generation_common.quantized.tensors.checks import Layer, broken
from text_generation_common.quantized.tensors.stored import stored
from text_generation_common.quantized.values import CodedScales, Fp8, Groups, SharedNumbers, Table4, Weight

# The numbers of e2m1: a sign, two bits of exponent, one bit of mantissa (OCP Microscaling Formats, 5.3.3).
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*MAGNITUDES, *(-number for number in MAGNITUDES))
NO_NUMBER = 255  # the code of e8m0 that is not a number


def read_fp8(layer: Layer, scheme: Scheme) -> Weight:
    scales = layer.finite(".weight_scale")
    if scheme.block is None:
        return Fp8(
            stored(layer[".weight"]), Groups(layer.inputs, scales.reshape(-1, 1).expand(layer.outputs, 1).contiguous())
        )
    rows, columns = scheme.block
    count = scales.shape[1]
    starts = torch.arange(layer.outputs, dtype=torch.int32, device=scales.device).unsqueeze(1) // rows * count
    return Fp8(stored(layer[".weight"]), Groups(columns, SharedNumbers(scales.flatten(), starts, count)))


def read_mxfp4(layer: Layer, scheme: Scheme) -> Weight:
    """gpt-oss's experts, [E, N, K / 2]."""
    q = layer["_blocks"].flatten(-2)[..., : layer.inputs // 2]  # the last block may be longer than the inputs
    return _table(q, _powers(layer, "_scales"), 32)


def read_fp4(layer: Layer, scheme: Scheme) -> Weight:
    """NVFP4, whose scales are multiplied or divided by one number of the layer, and compressed-tensors' MXFP4."""
    assert scheme.group_size is not None
    if scheme.packing is Packing.mxfp4_packed:
        return _table(layer[".weight_packed"], _powers(layer, ".weight_scale"), scheme.group_size)
    codes = layer.finite(".weight_scale").view(torch.uint8)
    # What each code stands for. Codes that are not numbers do not occur; tables with NaN would not be equal.
    numbers = torch.arange(256, dtype=torch.uint8, device=codes.device).view(torch.float8_e4m3fn).float().nan_to_num()
    if scheme.packing is Packing.nvfp4:
        q, numbers = layer[".weight_packed"], numbers / layer.finite(".weight_global_scale").reshape(())
    else:
        q, numbers = layer[".weight"], numbers * layer.finite(".weight_scale_2").reshape(())
    scales = CodedScales(codes, numbers)
    if not numbers.isfinite().all() and not scales.float().isfinite().all():
        raise broken(layer.name, "its scales together are not finite")
    return _table(q, scales, scheme.group_size)


def _powers(layer: Layer, name: str) -> Tensor:
    """Codes of e8m0, powers of 2."""
    codes = layer[name]
    if codes.amax() == NO_NUMBER:
        raise broken(layer.name, f"{layer.names[name]} has numbers that are not finite")
    return codes.view(torch.float8_e8m0fnu)


def _table(q: Tensor, scales: Tensor | CodedScales, size: int) -> Table4:
    return Table4(stored(q), Groups(size, scales), torch.tensor(E2M1, device=q.device))
