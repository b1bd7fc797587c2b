"""The two ends of a model, split over the ranks by token id: ids to hidden states, hidden states to logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_server.distributed import Group
from text_generation_server.kernels.interface import Kernels
from text_generation_server.layers.linear import make_linear


class Embedding:
    """Each rank looks up the ids whose rows it holds; elsewhere they are zeros, so that the sum is the table."""

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
    """Logits of all ids in float32, on rank 0. All ranks have weights of one shape, so the last ones may hold rows for
    no id."""

    def __init__(self, weight: Tensor, vocab_size: int, kernels: Kernels, group: Group) -> None:
        self._linear = make_linear(kernels, weight, dtype=torch.float32)
        self._vocab_size = vocab_size
        self._group = group

    def __call__(self, hidden_TH: Tensor) -> Tensor | None:
        """[T, V], or None on the other ranks."""
        parts = self._group.gather(self._linear(hidden_TH))
        if parts is None:
            return None
        if len(parts) == 1:
            return parts[0]
        # As compact as the logits of one shard are, so that the sampler computes the same on them.
        return torch.cat(parts, dim=1)[:, : self._vocab_size].contiguous()


def pad_rows(weight: Tensor, count: int) -> Tensor:
    """Zeros are added until there are `count` rows."""
    missing = count - weight.shape[0]
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight
