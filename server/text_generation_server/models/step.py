"""What one forward pass is told: which tokens, where they stand, and whose keys and values they may see."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions start … end - 1 of the prompt in table row `row`."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """T tokens: first one for each of the R decode rows, then the chunks one after the other, then padding.

    Padding tokens have position 0 and the extra slot; nobody attends to them.
    """

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64: where this token's keys and values go
    table: Tensor  # int32 [rows, positions]: the slot of every position of every row
    decode_rows_R: Tensor  # int64
    decode_lengths_R: Tensor  # int64, the token of this step included
    chunks: tuple[Chunk, ...]
