"""The gate of the MLP: out = gate / (1 + e^-gate) · up, in float32 with one rounding at the end."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.triton.tuning import find_tile


def silu_mul(gate_up: Tensor) -> Tensor:
    tokens, width = gate_up.shape
    size = width // 2
    assert gate_up.is_contiguous() and width % 2 == 0
    tile = find_tile("silu_mul", 1, 1, gate_up.dtype, gate_up.device)
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(tokens, triton.cdiv(size, tile.columns))](
        gate_up, out, SIZE=size, COLUMNS=tile.columns, num_warps=tile.warps
    )
    return out


@triton.jit
def _silu_mul(gate_up, out, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    gate = tl.load(gate_up + token * (2 * SIZE) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * SIZE) + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * SIZE + column, product.to(out.dtype.element_ty), mask=inside)
