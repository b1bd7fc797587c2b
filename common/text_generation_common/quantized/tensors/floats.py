"""Layers of floating-point numbers in 8 or 4 bits: fp8, MXFP4 and NVFP4."""

import torch
from torch import Tensor

from text_generation_common.quantized.scheme import Packing, Scheme
from text_generation_common.quantized.tensors.checks import Layer, broken
from text_generation_common.quantized.tensors.codes import repeated
from text_generation_common.quantized.values import Fp8, Groups, Table4, Weight

# The numbers of e2m1: a sign, two bits of exponent, one bit of mantissa (OCP Microscaling Formats, 5.3.3).
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*MAGNITUDES, *(-number for number in MAGNITUDES))
NO_NUMBER = 255  # the code of e8m0 that is not a number


def read_fp8(layer: Layer, scheme: Scheme) -> Weight:
    scales = layer.finite(".weight_scale")
    if scheme.block is None:
        return Fp8(layer[".weight"], Groups(layer.inputs, scales.reshape(-1, 1).expand(layer.outputs, 1).contiguous()))
    rows, columns = scheme.block
    return Fp8(layer[".weight"], Groups(columns, repeated(scales, rows, 0)[: layer.outputs]))


def read_mxfp4(layer: Layer, scheme: Scheme) -> Weight:
    """gpt-oss's experts, [E, N, K / 2]."""
    q = layer["_blocks"].flatten(-2)[..., : layer.inputs // 2]  # the last block may be longer than the inputs
    return _table(q, _powers(layer, "_scales"), 32)


def read_fp4(layer: Layer, scheme: Scheme) -> Weight:
    """NVFP4, whose scales are multiplied or divided by one number of the layer, and compressed-tensors' MXFP4."""
    assert scheme.group_size is not None
    match scheme.packing:
        case Packing.mxfp4_packed:
            return _table(layer[".weight_packed"], _powers(layer, ".weight_scale"), scheme.group_size)
        case Packing.nvfp4:
            q, scales = layer[".weight_packed"], _scales(layer) / layer.finite(".weight_global_scale").reshape(())
        case _:
            q, scales = layer[".weight"], _scales(layer) * layer.finite(".weight_scale_2").reshape(())
    if not scales.isfinite().all():
        raise broken(layer.name, "its scales together are not finite")
    return _table(q, scales, scheme.group_size)


def _scales(layer: Layer) -> Tensor:
    return layer.finite(".weight_scale").float()


def _powers(layer: Layer, name: str) -> Tensor:
    """Codes of e8m0, powers of 2."""
    codes = layer[name]
    if (codes == NO_NUMBER).any():
        raise broken(layer.name, f"{layer.names[name]} has numbers that are not finite")
    return codes.view(torch.float8_e8m0fnu)


def _table(q: Tensor, scales: Tensor, size: int) -> Table4:
    return Table4(q, Groups(size, scales), torch.tensor(E2M1, device=q.device))
