"""Linear layers of one weight or of several fused weights, in the form for the device, type and quantization."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_server.distributed import Group
from text_generation_server.kernels.interface import Kernels

# Length of the pieces of a dot product in float32 where torch computes, because no CPU kernels were compiled. torch's
# BLAS splits long dot products in a way that depends on the number of rows, but was measured not to split up to this
# length, so longer ones are split here, always at the same places. No BLAS guarantees it: only with the compiled
# kernels are a row's bits certainly independent of the other rows.
EXACT_LENGTH = 768
EXACT_BLOCK = 512
LARGEST_INT8 = 127
SMALLEST_SCALE = 1e-12

LinearOp = Callable[[Tensor], Tensor]


def make_linear(
    kernels: Kernels,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    int8: bool = False,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> LinearOp:
    """y = x Wᵀ + b with W [out, in]; y has the type `dtype`, or x's type. `int8` keeps the weights in 8 bits with one
    scale for each output. `gated`: the first half of the outputs are gates, and y = silu(gate) * up."""
    out_dtype = dtype or weight.dtype
    scales = None
    if int8:
        weight, scales = quantize(weight)
    if (packed := kernels.linear(weight, bias, scales, gated, out_dtype)) is not None:
        return packed
    linear: LinearOp = Linear(weight, bias) if scales is None else Int8Linear(weight, scales, bias)
    if gated:
        linear = GatedLinear(linear, kernels)
    return linear if dtype is None and scales is None else Cast(linear, out_dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight as int8 [out, in], rounded to the nearest, and the scales of its rows, float32 [out]."""
    weight = weight.float()
    scales = (weight.abs().amax(dim=1) / LARGEST_INT8).clamp(min=SMALLEST_SCALE)
    return (weight / scales.unsqueeze(1)).round().to(torch.int8), scales


class Linear:
    """A product by torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        is_exact = weight.dtype == torch.float32 and weight.device.type == "cpu"
        self._split = is_exact and weight.shape[1] > EXACT_LENGTH

    def __call__(self, x: Tensor) -> Tensor:
        if not self._split:
            return F.linear(x, self.weight, self.bias)
        xs, weights = torch.split(x, EXACT_BLOCK, dim=1), torch.split(self.weight, EXACT_BLOCK, dim=1)
        y = F.linear(xs[0], weights[0], self.bias)
        for part, weight in zip(xs[1:], weights[1:], strict=True):
            y += F.linear(part, weight)
        return y


class Int8Linear:
    """8-bit weights where there is no kernel for them. They take less memory, and are widened again in every step.

    y is float32, so that scale, bias and gate are computed without rounding: gates would multiply rounding errors.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._scales = scales
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self._weight.to(x.dtype)).float() * self._scales
        return y if self._bias is None else y + self._bias


class GatedLinear:
    def __init__(self, linear: LinearOp, kernels: Kernels) -> None:
        self._linear = linear
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.silu_mul(self._linear(x))


class Cast:
    def __init__(self, linear: LinearOp, dtype: torch.dtype) -> None:
        self._linear = linear
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x).to(self._dtype)


class RowLinear:
    """A linear layer whose inputs are split over the ranks: each rank computes its part, and all ranks get the sum."""

    def __init__(self, linear: LinearOp, group: Group) -> None:
        self._linear = linear
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self._linear(x))
