"""Puts our RMS norms in the places of transformers', where a trial shows that they compute the same.

transformers computes an RMS norm by seven operations of torch, four times in a layer of some models.
"""

from typing import Any

import torch
from torch import Tensor, nn

from text_generation_server.kernels.interface import Kernels

EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")  # names that norms have for the number added to the mean
# Factors of the rows of the trial: eps matters in small rows, and not in large ones.
SIZES = (1e-3, 1e-2, 1.0, 30.0)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # relative to each number


class KernelNorm(nn.Module):
    """An RMS norm of ours in the place of one of transformers'."""

    def __init__(self, kernels: Kernels, theirs: nn.Module, weight_D: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = theirs.weight
        self._kernels = kernels
        self._theirs = theirs
        self._weight_D = weight_D
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            result: Tensor = self._theirs(x)
            return result
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._kernels.rms_norm(rows, self._weight_D, self._eps).view(x.shape)


def replace_norms(model: Any, kernels: Kernels) -> None:
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if "RMSNorm" in type(module).__name__ and (ours := _like(module, kernels)) is not None:
                setattr(parent, name, ours)


def _like(theirs: nn.Module, kernels: Kernels) -> KernelNorm | None:
    """A norm of ours that computes what `theirs` does, or None."""
    parameters = dict(theirs.named_parameters())
    eps = next((value for name in EPS if isinstance(value := getattr(theirs, name, None), float)), None)
    if list(parameters) != ["weight"] or (weight := parameters["weight"].data).dim() != 1 or eps is None:
        return None
    rows = torch.randn(len(SIZES), len(weight), generator=torch.Generator().manual_seed(0))
    rows = (rows * torch.tensor(SIZES).unsqueeze(1)).to(weight)
    expected = theirs(rows)
    best, least = None, TOLERANCE.get(weight.dtype, 0.0)
    # The weight as it is; multiplied before the result is rounded; and the norms that have the weight minus 1.
    for candidate in (weight, weight.float(), weight.float() + 1):
        ours = KernelNorm(kernels, theirs, candidate, eps)
        result = ours(rows)
        if result.shape != expected.shape or result.dtype != expected.dtype:
            continue
        error = float(((result - expected).abs() / expected.abs().clamp(min=1e-6)).float().max())
        if error < least:
            best, least = ours, error
    return best
