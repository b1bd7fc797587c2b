"""Linear layers, alone or fused from several weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_server.distributed import Group

# On a CPU the BLAS splits long float32 dot products in a way that depends on the number of rows. Up to this length
# it was measured not to, so longer ones are split here, always alike.
EXACT_LENGTH = 768
EXACT_BLOCK = 512


class Linear:
    """y = x Wᵀ + b, with W [out, in]."""

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


class RowLinear:
    """A Linear whose inputs are spread over the ranks: each computes its part of the products, and all get the sum."""

    def __init__(self, linear: Linear, group: Group) -> None:
        self._linear = linear
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self._linear(x))
