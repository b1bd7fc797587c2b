"""The activation of an MLP, with or without a gate, in float32 with one rounding at the end."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_common.models.architecture import Activation
from text_generation_server.kernels.triton.tuning import find_tile


def activate(x: Tensor, activation: Activation, gated: bool) -> Tensor:
    tokens, width = x.shape
    size = width // 2 if gated else width
    assert x.is_contiguous() and (not gated or width % 2 == 0)
    tile = find_tile("silu_mul", 1, 1, x.dtype, x.device)
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    _activate[(tokens, triton.cdiv(size, tile.columns))](
        x, out, SIZE=size, COLUMNS=tile.columns, KIND=activation.name, GATED=gated, num_warps=tile.warps
    )
    return out


@triton.jit
def _activate(x, out, SIZE: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    row = x + token * (2 * SIZE if GATED else SIZE)
    value = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        value = value / (1.0 + tl.exp(-value))
    elif KIND == "gelu_tanh":  # 2 sqrt(2 / π) = 1.5957691
        value = value / (1.0 + tl.exp(-1.5957691216057308 * (value + 0.044715 * value * value * value)))
    elif KIND == "gelu":  # sqrt(1 / 2) = 0.70710678
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        value = tl.where(value < 0.0, 0.0, value)
    if GATED:
        value *= tl.load(row + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, value.to(out.dtype.element_ty), mask=inside)
