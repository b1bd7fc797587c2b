"""Linear layers whose products torch computes: the reference for every form of weights, and the way of devices that
have no kernel for a form."""

from collections.abc import Callable
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_common.quantized.tensors.matrix import exact_columns, exact_weight, order_of
from text_generation_common.quantized.tensors.splits import on_outputs, on_tensors
from text_generation_common.quantized.tensors.stored import converted
from text_generation_common.quantized.values import Dense, Int8, Weight

# Length of the pieces into which a long dot product in float32 is split if torch computes it, because no CPU kernels
# were compiled. torch's BLAS splits long dot products in a way that depends on the number of rows. Measurements showed
# no split up to this length, so longer ones are split here, always at the same places. No BLAS guarantees this: only
# with the compiled kernels are a row's bits certainly independent of the other rows.
EXACT_LENGTH = 768
EXACT_BLOCK = 512

# x Wᵀ + b for x [T, K] and b [N] or None.
Multiply = Callable[[Tensor, Tensor | None], Tensor]


class TorchLinear:
    """`Kernels.linear` by torch."""

    def __init__(
        self,
        multiply: Multiply,
        bias: Tensor | None,
        y_type: torch.dtype,
        factor: float = 1.0,
        gate: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`gate`: `Kernels.silu_mul`, if the layer is gated."""
        self._multiply = multiply
        self._bias = bias
        self._y_type = y_type
        self._factor = factor
        self._gate = gate

    def __call__(self, x: Tensor, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        if self._factor == 1:
            y = self._multiply(x, self._bias)
        else:
            y = self._multiply(x, None).float() * self._factor
            y = y if self._bias is None else y + self._bias
        if addend is not None:  # rows with an addend of -0 keep their bits
            y = (y.float() + addend).to(y.dtype)
        if self._gate is not None:
            y = self._gate(y)
        y = y.to(self._y_type)
        return y if out is None else out.copy_(y)


def torch_linear(
    weight: Weight,
    bias: Tensor | None,
    *,
    gated: bool,
    x_type: torch.dtype,
    y_type: torch.dtype,
    factor: float,
    silu_mul: Callable[[Tensor], Tensor],
) -> TorchLinear:
    """The layer of `Kernels.linear`."""
    weight = on_tensors(weight, converted)
    return TorchLinear(_multiply(weight, x_type), bias, y_type, factor, silu_mul if gated else None)


def _multiply(weight: Weight, x_type: torch.dtype) -> Multiply:
    if isinstance(weight, Dense) and weight.values.dtype == x_type:
        return DenseProduct(weight.values)
    return ScaledProduct(weight) if isinstance(weight, Int8) and has_row_scales(weight) else WideProduct(weight)


def has_row_scales(weight: Int8) -> bool:
    """Whether an output's weights are its integers times one scale."""
    groups = weight.groups
    return weight.order is None and groups.zeros is None and groups.offsets is None and groups.scales.shape[-1] == 1


class DenseProduct:
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        is_exact = weight.dtype == torch.float32 and weight.device.type == "cpu"
        self._split = is_exact and weight.shape[1] > EXACT_LENGTH

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not self._split:
            return F.linear(x, self._weight, bias)
        xs, weights = torch.split(x, EXACT_BLOCK, dim=1), torch.split(self._weight, EXACT_BLOCK, dim=1)
        y = F.linear(xs[0], weights[0], bias)
        for part, weight in zip(xs[1:], weights[1:], strict=True):
            y += F.linear(part, weight)
        return y


class ScaledProduct:
    """8-bit integers with one scale for each output. They take less memory, and are converted again in every step.

    y is float32, so that scale, bias and gate are computed without rounding: the gate would multiply rounding errors.
    """

    def __init__(self, weight: Int8) -> None:
        self._q = weight.q
        self._scales_N = weight.groups.scales.float()[:, 0]

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, self._q.to(x.dtype)).float() * self._scales_N
        return y if bias is None else y + bias


class WideProduct:
    """Any weight, which becomes float32 in every step. So are x and y."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        order = order_of(self._weight)
        x = x.float() if order is None else x[:, order].float()
        return DenseProduct(exact_columns(self._weight))(x, None if bias is None else bias.float())


def weight_of_expert(weights: Weight, expert: int, dtype: torch.dtype) -> Tensor:
    """The numbers of one of several experts' weights, rounded to a type."""
    if isinstance(weights, Dense):
        return weights.values[expert]
    return exact_weight(on_outputs(weights, itemgetter(expert))).to(dtype)
