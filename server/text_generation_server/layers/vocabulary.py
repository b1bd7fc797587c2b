"""Embedding (ids to hidden states) and head (hidden states to logits) of a model, split over the ranks by token id."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.tensors.splits import on_outputs, on_tensors
from text_generation_common.quantized.tensors.stored import converted
from text_generation_common.quantized.values import Dense, Weight
from text_generation_server.distributed import Group
from text_generation_server.kernels.interface import HoldsRows, Kernels, LinearKernel
from text_generation_server.layers.adapted import VocabularyAdapters
from text_generation_server.layers.linear import make_linear

# Rows of an embedding table, by their numbers (int32).
LookUp = Callable[[Tensor], Tensor]


def look_up_in(weight: Weight, kernels: Kernels, dtype: torch.dtype) -> LookUp:
    """Reads rows of a table that is kept in its form, and gives them in `dtype`."""
    if isinstance(weight, Dense):
        values = weight.values.to(dtype)
        return lambda ids_T: kernels.embed(ids_T, values)
    if (rows := rows_of(make_linear(kernels, weight, None, x_type=dtype, y_type=torch.float32))) is not None:
        return rows
    weight = on_tensors(weight, converted)
    return lambda ids_T: exact_weight(on_outputs(weight, lambda numbers: numbers[ids_T])).to(dtype)


def rows_of(linear: LinearKernel) -> LookUp | None:
    """Reads rows of a layer's weight; None if the layer does not keep it."""
    return linear.rows if isinstance(linear, HoldsRows) and linear.has_rows else None


class Embedding:
    """The embedding of one rank. It looks up the ids whose rows this rank holds, and gives zeros for all others; the
    sum over ranks has every row.
    """

    def __init__(self, look_up: LookUp, ids: range, group: Group) -> None:
        self._look_up = look_up
        self._ids = ids
        self._group = group

    def __call__(self, ids_T: Tensor) -> Tensor:
        if self._group.size == 1:
            return self._look_up(ids_T)
        elsewhere_T = (ids_T < self._ids.start) | (ids_T >= self._ids.stop)
        local_T = (ids_T - self._ids.start).masked_fill_(elsewhere_T, 0)
        x_TH = self._look_up(local_T)
        return self._group.all_reduce(x_TH.masked_fill_(elsewhere_T.unsqueeze(1), 0))


class Head:
    """The head of one rank: logits in float32. The weights of all ranks have one shape, so the last ranks may hold rows
    that belong to no id.
    """

    def __init__(
        self, weight: Weight, bias: Tensor | None, vocab_size: int, kernels: Kernels, group: Group, multiplier: float,
        dtype: torch.dtype, adapters: VocabularyAdapters, softcap: float | None = None,
    ) -> None:  # fmt: skip
        """The logits are multiplied, then become softcap * tanh(logit / softcap). `dtype`: that of hidden states."""
        self._linear = make_linear(kernels, weight, bias, x_type=dtype, y_type=torch.float32)
        self._adapters = adapters
        self._multiplier = multiplier if softcap is None else multiplier / softcap
        self._softcap = softcap
        self._vocab_size = vocab_size
        self._group = group

    def __call__(self, hidden_TH: Tensor, adapters_T: Tensor | None = None) -> Tensor | None:
        """The logits [T, V] of all ids on rank 0, None on other ranks. In memory, padding may follow each row."""
        parts = self._group.gather(self.of_part(hidden_TH, adapters_T))
        if parts is None:
            return None
        logits_TV = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[:, : self._vocab_size]
        # On a CPU, torch computes other bits from rows with padding between them. On a GPU a copy would cost time.
        return logits_TV.contiguous() if logits_TV.device.type == "cpu" else logits_TV

    def look_up(self) -> LookUp | None:
        """Reads rows of the weight; None if the head does not keep the weight in another form."""
        return rows_of(self._linear)

    def of_part(self, hidden_TH: Tensor, adapters_T: Tensor | None) -> Tensor:
        """The logits of this rank's ids, and after them columns of padding."""
        logits = self._linear(hidden_TH, addend=self._adapters.of_head(hidden_TH, adapters_T))
        if self._multiplier != 1:
            logits.mul_(self._multiplier)
        return logits if self._softcap is None else logits.tanh_().mul_(self._softcap)


def pad_rows(weight: Tensor, count: int) -> Tensor:
    """Adds rows of zeros to a matrix, or zeros to a vector, until it has `count` of them."""
    missing = count - weight.shape[0]
    return F.pad(weight, (0, 0) * (weight.dim() - 1) + (0, missing)) if missing else weight
