"""What one forward pass is told: which tokens, where they stand, and whose keys and values they may see."""

from dataclasses import dataclass

from torch import Tensor

from text_generation_server.kernels.interface import Segments


@dataclass(frozen=True, slots=True)
class StepInput:
    """T tokens: first one for each of the R decode rows, then the chunks one after the other, then padding.

    Padding tokens have position 0 and the extra slot; nobody attends to them. All tensors are int32.
    """

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor  # where this token's keys and values go
    table: Tensor  # [rows, positions]: the slot of every position of every row
    rows_R: Tensor
    lengths_R: Tensor  # the token of this step included
    segments: Segments | None  # decode rows and chunks; None: there are only decode rows
