"""What linear layers make of the weights that the files have: the forms of --quantize, made while a model is loaded."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from text_generation_common.quantized.agreement import Use
from text_generation_common.quantized.values import Dense, Groups, Int8, Weight

LARGEST_INT8 = 127
SMALLEST_SCALE = 1e-12


WeightFormat = Callable[[Tensor], Weight]


def dense(weight: Tensor) -> Dense:
    """Keeps the weight in its own type."""
    return Dense(weight)


def int8(weight: Tensor) -> Int8:
    """Converts the weight to 8 bits, rounded to the nearest, with one scale for each output."""
    exact = weight.float()
    scales_N = (exact.abs().amax(dim=1) / LARGEST_INT8).clamp(min=SMALLEST_SCALE)
    values = (exact / scales_N.unsqueeze(1)).round().to(torch.int8)
    return Int8(values, Groups(weight.shape[1], scales_N.unsqueeze(1)))


# What becomes of weights that the files have as numbers.
FORMATS: Mapping[Use, WeightFormat] = {Use.as_stored: dense, Use.int8_on_load: int8}
