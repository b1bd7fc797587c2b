"""Weights in MXFP4: numbers of 4 bits in blocks of 32, which share a scale of 8 bits (OCP Microscaling Formats, 5.3.3
and 5.4.1)."""

import torch
from torch import Tensor

# The numbers of e2m1: a sign, two bits of exponent, one bit of mantissa.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = (*MAGNITUDES, *(-number for number in MAGNITUDES))
SCALES = (*(2.0 ** (code - 127) for code in range(255)), float("nan"))


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., K] of blocks uint8 [..., K / 32, 16] and scales uint8 [..., K / 32]. A byte holds two numbers, the
    first in its lower half."""
    numbers = torch.tensor([[NUMBERS[byte % 16], NUMBERS[byte // 16]] for byte in range(256)], device=blocks.device)
    factors = torch.tensor(SCALES, device=blocks.device)[scales.int()]
    return (numbers[blocks.int()].flatten(-2) * factors.unsqueeze(-1)).flatten(-2)
