"""Elementwise functions of torch on CPUs, which MKL computes where torch has it.

MKL chooses the code of a function at the function's first call. If that call comes from several threads, as for a large
tensor, one of them may compute its part with a relative error of 2e-4, and no error tells of it: seen in 5 % of the
starts on a busy machine, in the half of the rotary tables for the later positions
(https://github.com/pytorch/pytorch/issues/188792; MKL 2024.2, which torch 2.13 still contains).
"""

import torch

FUNCTIONS = (
    *(torch.acos, torch.asin, torch.atan, torch.cos, torch.cosh, torch.erf, torch.erfc, torch.erfinv, torch.exp),
    *(torch.exp2, torch.expm1, torch.lgamma, torch.log, torch.log10, torch.log1p, torch.log2, torch.rsqrt),
    *(torch.sigmoid, torch.sin, torch.sinh, torch.sqrt, torch.tan, torch.tanh, torch.special.ndtri),
)


def choose_code() -> None:
    """Has the code of each function chosen now, by calls with one number, which one thread computes. To be called
    before torch computes anything else. Takes two milliseconds."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for function in FUNCTIONS:
            function(number)
