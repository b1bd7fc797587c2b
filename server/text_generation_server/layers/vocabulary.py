"""Embedding (ids to hidden states) and head (hidden states to logits) of a model, split over the ranks by token id."""

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_server.distributed import Group
from text_generation_server.kernels.interface import Kernels
from text_generation_server.layers.linear import make_linear
from text_generation_server.layers.weights import dense


class Embedding:
    """The embedding of one rank. It looks up the ids whose rows this rank holds, and gives zeros for all others; the
    sum over ranks has every row.
    """

    def __init__(self, weight: Tensor, ids: range, kernels: Kernels, group: Group) -> None:
        self._weight = weight
        self._ids = ids
        self._kernels = kernels
        self._group = group

    def __call__(self, ids_T: Tensor) -> Tensor:
        if self._group.size == 1:
            return self._kernels.embed(ids_T, self._weight)
        elsewhere_T = (ids_T < self._ids.start) | (ids_T >= self._ids.stop)
        local_T = (ids_T - self._ids.start).masked_fill_(elsewhere_T, 0)
        x_TH = self._kernels.embed(local_T, self._weight)
        return self._group.all_reduce(x_TH.masked_fill_(elsewhere_T.unsqueeze(1), 0))


class Head:
    """The head of one rank: logits of all ids in float32, collected on rank 0. The weights of all ranks have one shape,
    so the last ranks may hold rows that belong to no id.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, vocab_size: int, kernels: Kernels, group: Group, multiplier: float
    ) -> None:
        self._linear = make_linear(kernels, dense(weight), bias, dtype=torch.float32)
        self._multiplier = multiplier
        self._vocab_size = vocab_size
        self._group = group

    def __call__(self, hidden_TH: Tensor) -> Tensor | None:
        """The logits [T, V] on rank 0, None on other ranks."""
        parts = self._group.gather(self._linear(hidden_TH))
        if parts is None:
            return None
        # Made contiguous, like the logits of a single shard, so that the sampler computes the same bits.
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)[:, : self._vocab_size].contiguous()
        return logits if self._multiplier == 1 else logits.mul_(self._multiplier)


def pad_rows(weight: Tensor, count: int) -> Tensor:
    """Adds rows of zeros to a matrix, or zeros to a vector, until it has `count` of them."""
    missing = count - weight.shape[0]
    return F.pad(weight, (0, 0) * (weight.dim() - 1) + (0, missing)) if missing else weight
