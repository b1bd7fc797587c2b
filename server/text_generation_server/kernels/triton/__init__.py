"""The kernels for GPUs, in Triton: the functions of `interface.Kernels`.

Shapes are named as in `kernels`. No kernel is compiled again while serving. Values that vary from step to step are read
on the device or change only the grid, and vectors of a step may begin at any address (`do_not_specialize`).
"""

from text_generation_server.kernels.reference import (
    add,  # torch's sum: a kernel of our own would not be faster
    experts_of_codes,
)
from text_generation_server.kernels.triton.adapters import adapt, adapt_embeddings, pair_slots
from text_generation_server.kernels.triton.advance import advance, place
from text_generation_server.kernels.triton.attend import attend
from text_generation_server.kernels.triton.experts import add_scored, experts, route
from text_generation_server.kernels.triton.layers import activate, embed, linear, silu_mul
from text_generation_server.kernels.triton.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_part,
)
from text_generation_server.kernels.triton.rope_kv import rope_and_store_kv
from text_generation_server.kernels.triton.sample import (
    merge_parts,
    reduce_part,
    sample,
    sorts,
    splits_draws,
    vocabulary_part,
)

__all__ = [
    "activate", "adapt", "adapt_embeddings", "add", "add_layer_norm", "add_rms_norm", "add_scored", "advance", "attend",
    "embed", "experts", "experts_of_codes", "layer_norm", "linear", "merge_parts", "pair_slots", "place", "reduce_part",
    "rms_norm", "rms_norm_part", "rope_and_store_kv", "route", "sample", "silu_mul", "sorts", "splits_draws",
    "vocabulary_part",
]  # fmt: skip
