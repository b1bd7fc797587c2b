"""The forms in which the weights of linear layers are kept."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_common.flags.kinds import Quantize

LARGEST_INT8 = 127
SMALLEST_SCALE = 1e-12


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight W [N outputs, K inputs], which is `values`, or with scales `values * scales`."""

    values: Tensor  # [N, K], of the type `dtype`, or int8 with scales
    dtype: torch.dtype  # type of the layer's inputs and, unless another type is requested, of its outputs
    scales_N: Tensor | None = None  # float32, one for each output


WeightFormat = Callable[[Tensor], Weight]


def dense(weight: Tensor) -> Weight:
    """Keeps the weight in its own type."""
    return Weight(weight, weight.dtype)


def int8(weight: Tensor) -> Weight:
    """Converts the weight to 8 bits, rounded to the nearest, with one scale for each output."""
    exact = weight.float()
    scales_N = (exact.abs().amax(dim=1) / LARGEST_INT8).clamp(min=SMALLEST_SCALE)
    values = (exact / scales_N.unsqueeze(1)).round().to(torch.int8)
    return Weight(values, weight.dtype, scales_N)


# Formats by the value of --quantize.
FORMATS: Mapping[Quantize | None, WeightFormat] = {None: dense, Quantize.int8: int8}
