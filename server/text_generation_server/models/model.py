"""The interface of a model: all that the runner knows of it."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from text_generation_server.device.arena import zeros
from text_generation_server.kernels.interface import KvLayer
from text_generation_server.models.kv_cache import MakeTensor
from text_generation_server.step.inputs import StepInput


class Model(Protocol):
    """This rank's part of a model. It keeps no state between steps. The state of a token or of a row lies in the cache,
    which the runner makes at each Warmup and passes to every step.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def vocabulary(self) -> range:
        """The token ids of this rank's part of the vocabulary."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the model computes."""
        ...

    @property
    def max_total_tokens(self) -> int:
        """Length of the longest history, in tokens, for which the model was loaded."""
        ...

    @property
    def bytes_per_row(self) -> int:
        """Bytes of the cache that each row takes, however long its history is. 0 if the layers keep only keys and
        values.
        """
        ...

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Bytes that one slot takes in a cache whose numbers are of type `dtype`."""
        ...

    def one_layer_of_each_kind(self) -> "Model":
        """A model that runs only the first of the layers that are alike, on this one's weights. Its steps take the
        memory of this model's steps but for the cache, and as long between two progress reports. A model whose layers
        cannot be told apart returns itself."""
        ...

    def make_cache(self, slots: int, rows: int, dtype: torch.dtype, make: MakeTensor = zeros) -> list[KvLayer]:
        """A cache of `slots` slots and `rows` rows, with an extra slot and an extra row for padding, of tensors that
        `make` gives. No page of a large tensor on a CPU is written: see `take_memory`."""
        ...

    def forward(self, step: StepInput, cache: list[KvLayer], on_layer: Callable[[], None]) -> Tensor:
        """Returns hidden states [T, H] after the last norm, and writes the tokens' keys and values into the cache."""
        ...

    def logits(self, hidden_TH: Tensor, adapters_T: Tensor | None = None) -> Tensor | None:
        """The logits [T, V], float32, on rank 0; None on other ranks. All ranks must call it. `adapters_T`: as in the
        `StepInput`, of these tokens."""
        ...

    def own_logits(self, hidden_TH: Tensor, adapters_T: Tensor | None = None) -> Tensor:
        """The logits of this rank's part of the vocabulary, float32, and behind them padding, so that the logits have
        one shape on all ranks."""
        ...
