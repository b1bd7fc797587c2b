"""The tensors of a GGUF file that a model loads."""

import re
from collections.abc import Mapping
from dataclasses import replace

from text_generation_common.gguf.container import GgufHeader, GgufTensor
from text_generation_common.gguf.keys import Keys

# Factors of ropes, which are read with the keys.
OF_ROPES = re.compile(r"(^|\.)(rope_freqs|rope_factors_(long|short)|attn_rot_embd)\.weight$")
LAYER = re.compile(r"blk\.(\d{1,4})\.")
SCORE = ".ffn_gate_inp_shexp.weight"  # [H], which is [1, H] in other files


def model_tensors(header: GgufHeader) -> Mapping[str, GgufTensor]:
    """All tensors but those of ropes, and of layers at the end that only predict further tokens."""
    layers = Keys(header).layers
    found = {}
    for name, tensor in header.tensors.items():
        layer = LAYER.match(name)
        if OF_ROPES.search(name) or (layer is not None and int(layer[1]) >= layers):
            continue
        found[name] = (
            replace(tensor, shape=(1, *tensor.shape)) if name.endswith(SCORE) and len(tensor.shape) == 1 else tensor
        )
    return found
