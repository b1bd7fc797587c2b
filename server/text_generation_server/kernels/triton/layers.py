"""What layers compute beside attention, norms and experts: rows of the embedding table, out[t] = weight[ids[t]]; the
activation of an MLP, with or without a gate, in float32 with one rounding at the end. Products by weights that are not
quantized are torch's, by cuBLAS: kernels of our own would not be faster. All others are in `codes`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_common.models.architecture import Activation
from text_generation_common.quantized.tensors.splits import on_tensors
from text_generation_common.quantized.tensors.stored import converted
from text_generation_common.quantized.values import Dense, Weight
from text_generation_server.kernels.interface import LinearKernel
from text_generation_server.kernels.products import TorchLinear, torch_linear
from text_generation_server.kernels.triton.codes import UnpackingLinear, can_multiply
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


def embed(ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    tokens, hidden = len(ids_T), weight_VH.shape[1]
    assert ids_T.is_contiguous() and weight_VH.is_contiguous()
    tile = find_tile("embed", 1, 1, weight_VH.dtype, weight_VH.device)
    out = torch.empty((tokens, hidden), dtype=weight_VH.dtype, device=weight_VH.device)
    _embed[(tokens, triton.cdiv(hidden, tile.columns))](
        ids_T, weight_VH, out, HIDDEN=hidden, COLUMNS=tile.columns, num_warps=tile.warps
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _embed(ids, weight, out, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(ids + token).to(tl.int64)
    x = tl.load(weight + row * HIDDEN + column, mask=column < HIDDEN, other=0.0)
    tl.store(out + token * HIDDEN + column, x, mask=column < HIDDEN)


HALF_PRECISION = (torch.bfloat16, torch.float16)


def linear(
    weight: Weight, bias: Tensor | None, *, gated: bool, x_type: torch.dtype, y_type: torch.dtype, factor: float = 1.0
) -> LinearKernel:
    if isinstance(weight, Dense) and not gated and factor == 1 and y_type == torch.float32:
        values = weight.values
        if values.device.type == "cuda" and values.dtype == x_type and x_type in HALF_PRECISION:
            return TorchLinear(UnroundedProduct(values), bias, y_type)
    weight = on_tensors(weight, converted)
    if not isinstance(weight, Dense) and can_multiply(weight):
        return UnpackingLinear(weight, bias, gated=gated, y_type=y_type, factor=factor, silu_mul=silu_mul)
    return torch_linear(weight, bias, gated=gated, x_type=x_type, y_type=y_type, factor=factor, silu_mul=silu_mul)


class UnroundedProduct:
    """x Wᵀ + b in float32, for x and W in half precision. cuBLAS adds up in float32, and the result has these sums:
    they are not rounded to half precision, and no second pass over the result converts them."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.mm(x, self._weight.t(), out_dtype=torch.float32)
        return y if bias is None else y.add_(bias)
