"""RMSNorm, alone or after the residual's addition: y = x / √(mean(x²) + ε) · weight.

As in transformers, the quotient is rounded to the model's type before it is multiplied by the weight, and the sum with
the residual before it is squared.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.triton.tuning import find_tile


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return _launch(x_TH, x_TH, weight_H, eps, add=False)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `interface`. Writes the sum into residual_TH."""
    return _launch(x_TH, residual_TH, weight_H, eps, add=True), residual_TH


def rms_norm_part(x_TN: Tensor, part: range, weight: Tensor, eps: float) -> None:
    assert x_TN.is_contiguous()
    columns = x_TN[:, part.start : part.stop]
    _launch_into(columns, columns, columns, weight, eps, stride=x_TN.shape[1], add=False)


def _launch(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, add: bool) -> Tensor:
    assert x_TH.is_contiguous() and residual_TH.is_contiguous()
    y_TH = torch.empty_like(x_TH)
    _launch_into(y_TH, x_TH, residual_TH, weight_H, eps, stride=x_TH.shape[1], add=add)
    return y_TH


def _launch_into(
    y_TH: Tensor, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, stride: int, add: bool
) -> None:
    tokens, hidden = x_TH.shape
    assert weight_H.is_contiguous() and weight_H.shape == (hidden,)
    _rms_norm[(tokens,)](
        x_TH, residual_TH, weight_H, y_TH, eps, STRIDE=stride, HIDDEN=hidden, H=triton.next_power_of_2(hidden),
        ADD=add, EXACT=weight_H.dtype != x_TH.dtype,
        num_warps=find_tile("rms_norm", 1, 1, x_TH.dtype, x_TH.device).warps,
    )  # fmt: skip


@triton.jit
def _rms_norm(
    x, residual, weight, y, eps,
    STRIDE: tl.constexpr, HIDDEN: tl.constexpr, H: tl.constexpr, ADD: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A program normalises one row; rows are STRIDE numbers apart. With ADD, it first computes residual += x, and
    normalises the sum. With EXACT, the weight is float32 and multiplies before the rounding. y may be x."""
    dtype = y.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * STRIDE
    column = tl.arange(0, H)
    inside = column < HIDDEN
    value = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + at + column, mask=inside, other=0.0).to(tl.float32)
        total = value.to(dtype)
        tl.store(residual + at + column, total, mask=inside)
        value = total.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    if not EXACT:
        value = value.to(dtype).to(tl.float32)
    scaled = value * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at + column, scaled.to(dtype), mask=inside)


def layer_norm(x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
    return _launch_layer_norm(x_TH, x_TH, weight_H, bias_H, eps, add=False)


def add_layer_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `interface`. The sum is written into residual_TH."""
    return _launch_layer_norm(x_TH, residual_TH, weight_H, bias_H, eps, add=True), residual_TH


def _launch_layer_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float, add: bool
) -> Tensor:
    tokens, hidden = x_TH.shape
    assert x_TH.is_contiguous() and residual_TH.is_contiguous() and weight_H.is_contiguous()
    y_TH = torch.empty_like(x_TH)
    warps = find_tile("rms_norm", 1, 1, x_TH.dtype, x_TH.device).warps
    _layer_norm[(tokens,)](
        x_TH, residual_TH, weight_H, bias_H, y_TH, eps=eps, HIDDEN=hidden, H=triton.next_power_of_2(hidden), ADD=add,
        BIAS=bias_H is not None, num_warps=warps,
    )  # fmt: skip
    return y_TH


@triton.jit
def _layer_norm(
    x, residual, weight, bias, y, eps, HIDDEN: tl.constexpr, H: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """A program: one row. With ADD, residual += x, and the sum is normalised."""
    dtype = y.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, H)
    inside = column < HIDDEN
    value = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + at + column, mask=inside, other=0.0).to(tl.float32)
        total = value.to(dtype)
        tl.store(residual + at + column, total, mask=inside)
        value = total.to(tl.float32)
    value = tl.where(inside, value - tl.sum(value, 0) / HIDDEN, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    value *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at + column, value.to(dtype), mask=inside)
