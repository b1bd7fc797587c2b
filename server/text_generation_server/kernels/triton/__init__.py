"""The kernels for GPUs, in Triton: the functions of `interface.Kernels`, each in its own file.

Shapes are named as in `kernels`. Whatever varies from step to step is read on the device or changes the grid only, and
vectors of a step may lie at any address (`do_not_specialize`), so that nothing is compiled again while serving.
"""

from text_generation_server.kernels.reference import linear  # cuBLAS's products are as good as ours would be
from text_generation_server.kernels.triton.advance import advance, place
from text_generation_server.kernels.triton.attend_decode import attend_decode
from text_generation_server.kernels.triton.attend_prefill import attend_prefill
from text_generation_server.kernels.triton.embed import embed
from text_generation_server.kernels.triton.norm import add_rms_norm, rms_norm
from text_generation_server.kernels.triton.rope_kv import rope_and_store_kv
from text_generation_server.kernels.triton.sample import sample
from text_generation_server.kernels.triton.silu_mul import silu_mul

__all__ = [
    "add_rms_norm",
    "advance",
    "attend_decode",
    "attend_prefill",
    "embed",
    "linear",
    "place",
    "rms_norm",
    "rope_and_store_kv",
    "sample",
    "silu_mul",
]
