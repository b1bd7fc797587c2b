"""Writes goldens/gguf/blocks.safetensors: random blocks of each type of GGUF files, and what the package `gguf` makes
of them in float32. Run it by hand, beside numpy:

    pip install gguf torch safetensors
    python make_block_goldens.py
"""

from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import save_file

OUTPUTS = 4
# Where a block has float16.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip


def random_blocks(kind: str, count: int) -> np.ndarray:
    """Any bits, with the exception of scales that are not finite."""
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = np.random.randint(0, 256, (OUTPUTS, count, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = blocks[..., at : at + 2].copy().view(np.float16)
        blocks[..., at : at + 2] = np.where(np.isfinite(halves), halves, np.float16(-0.37)).view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] %= 255
        blocks[0, :2, 0] = 0, 1
    return blocks.reshape(OUTPUTS, -1)


if __name__ == "__main__":
    np.random.seed(36)
    tensors = {}
    for kind in HALVES:
        numbers, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        blocks = random_blocks(kind, 512 // numbers)
        with np.errstate(over="ignore"):
            matrix = dequantize(blocks, GGMLQuantizationType[kind])
        tensors |= {kind: torch.from_numpy(blocks), f"{kind} W": torch.from_numpy(matrix)}
    path = Path(__file__).parent / "goldens" / "gguf" / "blocks.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    print(path.stat().st_size)
