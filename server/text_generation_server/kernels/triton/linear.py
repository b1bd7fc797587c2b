"""Products on a GPU. All are torch's, by cuBLAS: kernels of our own would not be faster."""

from collections.abc import Callable

import torch
from torch import Tensor

HALF_PRECISION = (torch.bfloat16, torch.float16)


def linear(
    weight: Tensor, bias: Tensor | None, scales_N: Tensor | None, gated: bool, dtype: torch.dtype
) -> Callable[[Tensor], Tensor] | None:
    is_plain = scales_N is None and not gated and weight.device.type == "cuda"
    if is_plain and weight.dtype in HALF_PRECISION and dtype == torch.float32:
        return WideLinear(weight, bias)
    return None


class WideLinear:
    """y = x Wᵀ + b in float32, for x and W in half precision. cuBLAS adds up in float32, and y has these sums: they are
    not rounded to half precision, and no second pass over y converts them."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.mm(x, self._weight.t(), out_dtype=torch.float32)
        return y if self._bias is None else y.add_(self._bias)
