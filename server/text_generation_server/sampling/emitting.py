"""A test's tokens instead of sampled ones: a fault that lets a model of any weights write a given text."""

from torch import Tensor

from text_generation_common import faults
from text_generation_server.step.rows import Rows


def emit(ids_R: Tensor, rows: Rows, index: tuple[int, ...]) -> None:
    """Overwrites sampled ids by those that the fault point `shard.sampled` names, if it names any. Each row of `index`
    gets the id at its place in the row's output; after the last one its own id remains."""
    for i, row in enumerate(index if (given := faults.emitted("shard.sampled")) else ()):
        place = int(rows.known[row]) - rows.parameters.prompt_length[row]
        if place < len(given):
            ids_R[i] = given[place]
