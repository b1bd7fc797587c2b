"""Bytes that steps of the checked model read, and operations that they compute, in bfloat16."""

import torch

from text_generation_benchmark.shapes import LlamaShape
from text_generation_server.models.kv_cache import SCALE, SCALED

REHEARSED = LlamaShape(
    hidden=128, intermediate=320, layers=2, heads=4, kv_heads=2, vocabulary=4000, max_positions=1024, tied=False
)
ITEM_BYTES = 2  # bytes of a bfloat16 number


def weight_bytes(shape: LlamaShape) -> int:
    """Bytes of weights that every decode step reads: all layers and the output head. A step reads only a few rows of
    the embedding.
    """
    return ITEM_BYTES * (shape.layers * shape.layer_weights + shape.head_weights)


def kv_bytes(shape: LlamaShape, cache: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the keys and values of one token, scales included, which every decode step of its row reads."""
    scales = SCALE.itemsize * shape.layers * 2 * shape.kv_heads if cache in SCALED else 0
    return cache.itemsize * shape.kv_numbers + scales


def prefill_flops(shape: LlamaShape, tokens: int) -> int:
    """Operations for a prompt of `tokens` tokens, of which only the last token needs logits."""
    products = 2 * tokens * shape.layers * shape.layer_weights + 2 * shape.head_weights
    return products + shape.layers * attention_flops(shape, tokens)


def attention_flops(shape: LlamaShape, tokens: int) -> int:
    """Operations of one layer's attention for a prompt: each token's scores and weighted sum over the tokens up to
    itself.
    """
    return 4 * shape.heads * shape.head_size * tokens * (tokens + 1) // 2
