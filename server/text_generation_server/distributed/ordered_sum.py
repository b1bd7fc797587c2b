"""Sums tensors of ranks in a fixed order, so that every rank that computes the sum gets the same bits."""

import torch
from torch import Tensor


def sum_in_order(parts: list[Tensor], out: Tensor) -> None:
    """out = parts[0] + parts[1] + …, from left to right. Half-precision numbers are summed in float32 and rounded once.

    `out` must not be one of the parts.
    """
    if out.dtype not in (torch.bfloat16, torch.float16):
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out += part
        return
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    out.copy_(total)
