"""The input of one forward pass: tokens, their positions, and the keys and values to which each of them may attend."""

from dataclasses import dataclass

from torch import Tensor

from text_generation_server.kernels.interface import Segments


@dataclass(frozen=True, slots=True)
class StepInput:
    """The input of T tokens: first one token for each of the R decode rows, then the chunks one after the other, then
    padding.

    Padding tokens have position 0 and the extra slot; no token attends to them. All tensors are int32.
    """

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor  # slots into which the tokens' keys and values are written
    table: Tensor  # [rows, positions]: the slot of every position of every row
    rows_R: Tensor
    lengths_R: Tensor  # lengths of the decode rows, this step's token included
    segments: Segments | None  # the chunks; None: there are only decode rows
    adapters_T: Tensor | None = None  # the adapter of each token, by its slot; -1: none. None: no token has one
