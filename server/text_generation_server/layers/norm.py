"""The norms of hidden states, of both kinds and none, alone or after an addition."""

from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_server.distributed import Group
from text_generation_server.kernels.interface import Kernels


class RmsNorm:
    def __init__(self, kernels: Kernels, weight_H: Tensor, eps: float) -> None:
        self._kernels = kernels
        self._weight = weight_H
        self._eps = eps

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self._kernels.rms_norm(x_TH, self._weight, self._eps)

    def of_sum(self, x_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), in one kernel. May write into its inputs."""
        return self._kernels.add_rms_norm(x_TH, residual_TH, self._weight, self._eps)


class LayerNorm:
    def __init__(self, kernels: Kernels, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> None:
        self._kernels = kernels
        self._weight = weight_H
        self._bias = bias_H
        self._eps = eps

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self._kernels.layer_norm(x_TH, self._weight, self._bias, self._eps)

    def of_sum(self, x_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.add_layer_norm(x_TH, residual_TH, self._weight, self._bias, self._eps)


class NoNorm:
    """Stands where a model has no norm: hidden states are read as they are."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(self, x_TH: Tensor) -> Tensor:
        return x_TH

    def of_sum(self, x_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        total_TH = self._kernels.add(x_TH, residual_TH)
        return total_TH, total_TH


class HeadsTogether:
    """RMSNorms of all query heads together, and of all key heads, in the fused product of queries, keys and values."""

    def __init__(self, kernels: Kernels, group: Group, weights: Sequence[Tensor], eps: float) -> None:
        """`weights`: those of this rank's query heads, and those of its key heads. All ranks have equally many."""
        self._kernels = kernels
        self._group = group
        self._eps = eps
        self._parts: list[tuple[range, Tensor]] = []
        start = 0
        for weight in weights:
            self._parts.append((range(start, start + len(weight)), weight))
            start += len(weight)

    def __call__(self, qkv: Tensor) -> None:
        """In place."""
        if self._group.size > 1:
            self._norm_over_ranks(qkv)
            return
        for part, weight in self._parts:
            self._kernels.rms_norm_part(qkv, part, weight, self._eps)

    def _norm_over_ranks(self, qkv: Tensor) -> None:
        columns = [qkv[:, part.start : part.stop] for part, _ in self._parts]
        means = torch.stack([x.float().pow(2).mean(1) for x in columns], dim=1)
        factors = torch.rsqrt(self._group.all_reduce(means) / self._group.size + self._eps)
        for x, factor_T, (_, weight) in zip(columns, factors.unbind(1), self._parts, strict=True):
            normed = x.float() * factor_T.unsqueeze(1)
            x.copy_(weight * (normed if weight.dtype == torch.float32 else normed.to(x.dtype)))


HiddenNorm = RmsNorm | LayerNorm | NoNorm
