"""What linear layers make of the weights that the files have: the forms of --quantize, made while a model is loaded."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_common.flags.kinds import HeadDtype
from text_generation_common.quantized.agreement import Use
from text_generation_common.quantized.sizes import INT4_GROUP
from text_generation_common.quantized.tensors.codes import pack_pairs
from text_generation_common.quantized.values import Dense, Fp8, Groups, Int4, Int8, Weight

LARGEST_INT8, LARGEST_FP8 = 127, 448
ZERO_OF_INT4 = 8  # the code of 0
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


def int4(weight: Tensor) -> Weight:
    """Converts the weight to 4 bits, rounded to the nearest, with one scale for INT4_GROUP inputs: the number that is
    largest in magnitude becomes code 0, which is -8. An odd number of inputs becomes 8 bits."""
    outputs, inputs = weight.shape
    if inputs % 2:
        return int8(weight)
    exact = F.pad(weight.float(), (0, -inputs % INT4_GROUP)).view(outputs, -1, INT4_GROUP)
    largest = exact.gather(2, exact.abs().argmax(dim=2, keepdim=True))
    scales = (largest / -ZERO_OF_INT4).to(torch.float16)
    codes = (exact / scales.float() + ZERO_OF_INT4).nan_to_num(ZERO_OF_INT4).round().clamp(0, 15).to(torch.uint8)
    return Int4(pack_pairs(codes.view(outputs, -1)[:, :inputs]), Groups(INT4_GROUP, scales.squeeze(2)))


def fp8(weight: Tensor) -> Fp8:
    """Converts the weight to float8_e4m3fn, with one scale for each output."""
    exact = weight.float()
    scales_N = (exact.abs().amax(dim=1) / LARGEST_FP8).clamp(min=SMALLEST_SCALE)
    values = (exact / scales_N.unsqueeze(1)).to(torch.float8_e4m3fn)
    return Fp8(values, Groups(weight.shape[1], scales_N.unsqueeze(1)))


# What becomes of weights that the files have as numbers.
FORMATS: Mapping[Use, WeightFormat] = {
    Use.as_stored: dense, Use.int8_on_load: int8, Use.int4_on_load: int4, Use.fp8_on_load: fp8,
}  # fmt: skip
# What a copy of the head becomes.
HEAD_FORMATS: Mapping[HeadDtype, WeightFormat] = {
    HeadDtype.float32: lambda weight: Dense(weight.float()),
    HeadDtype.bfloat16: lambda weight: Dense(weight.bfloat16()),
    HeadDtype.int8: int8,
    HeadDtype.int4: int4,
}
