"""Linear layers of one weight or of several fused weights."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from text_generation_common.quantized.tensors.splits import size_of
from text_generation_common.quantized.values import Dense, Int4, Int8, Weight
from text_generation_server.distributed import Group
from text_generation_server.kernels.interface import Kernels, LinearKernel

# Zeros fill up the sizes of some weights to a multiple of this. Such weights fill whole panels of the CPU's kernels,
# and a decode step with them can be recorded.
PANEL = 32


class LinearOp(Protocol):
    def __call__(self, x: Tensor, *, addend: Tensor | None = None) -> Tensor:
        """See `LinearKernel`."""
        ...


def make_linear(
    kernels: Kernels,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    x_type: torch.dtype | None = None,
    y_type: torch.dtype | None = None,
    factor: float = 1.0,
) -> LinearKernel:
    """A layer y = factor * x Wᵀ + b with W [out, in]. `gated`: the first half of the outputs are gates, and
    y = silu(gate) * up. x has the type `x_type`, or that of a dense weight, and y the type `y_type`, or x's type."""
    if x_type is None:
        assert isinstance(weight, Dense), "the weight does not say which type x has"
        x_type = weight.values.dtype
    order = None
    # A kernel takes an order of all inputs. A rank's part has some of them several times.
    if isinstance(weight, Int4 | Int8) and weight.order is not None and int(weight.order.max()) + 1 < len(weight.order):
        weight, order = replace(weight, order=None), weight.order
    linear = kernels.linear(weight, bias, gated=gated, x_type=x_type, y_type=y_type or x_type, factor=factor)
    return linear if order is None else PickedLinear(linear, order)


class PickedLinear:
    """A linear layer of some columns of x, in another order."""

    def __init__(self, linear: LinearKernel, order: Tensor) -> None:
        self._linear = linear
        self._order = order

    def __call__(self, x: Tensor, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        return self._linear(x[:, self._order], out, addend)


class SeveralLinear:
    """One result of several products of the same input, each of which writes its own columns."""

    def __init__(self, linears: Sequence[LinearKernel], outputs: Sequence[int], y_type: torch.dtype) -> None:
        ends = [*accumulate(outputs)]
        self._parts = [*zip(linears, (0, *ends), ends, strict=False)]
        self._width = ends[-1]
        self._y_type = y_type

    def __call__(self, x: Tensor, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        y = torch.empty((x.shape[0], self._width), dtype=self._y_type, device=x.device) if out is None else out
        for linear, start, end in self._parts:
            linear(x, out=y[:, start:end], addend=None if addend is None else addend[:, start:end])
        return y


class GatedSeveral:
    """The product of gates and ups that are several products, and silu(gate) * up of it."""

    def __init__(self, several: SeveralLinear, kernels: Kernels) -> None:
        self._several = several
        self._kernels = kernels

    def __call__(self, x: Tensor, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        y = self._kernels.silu_mul(self._several(x, addend=addend))
        return y if out is None else out.copy_(y)


def make_fused(
    kernels: Kernels, weights: Sequence[Weight], bias: Tensor | None, *, gated: bool, x_type: torch.dtype
) -> LinearKernel:
    """The layer of `make_linear` whose outputs are those of several weights, one after the other."""
    if len(weights) == 1:
        return make_linear(kernels, weights[0], bias, gated=gated, x_type=x_type)
    outputs = [size_of(weight)[0] for weight in weights]
    biases = [None] * len(weights) if bias is None else torch.split(bias, outputs)
    linears = [make_linear(kernels, weight, b, x_type=x_type) for weight, b in zip(weights, biases, strict=True)]
    several = SeveralLinear(linears, outputs, x_type)
    return GatedSeveral(several, kernels) if gated else several


class RowLinear:
    """A linear layer whose inputs are split over the ranks: each rank computes its part, and all ranks get the sum of
    the parts.
    """

    def __init__(self, linear: LinearOp, group: Group) -> None:
        self._linear = linear
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self._linear(x))

    def part(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """This rank's part of the sum."""
        return self._linear(x, addend=addend)
