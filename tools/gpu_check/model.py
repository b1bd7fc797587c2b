"""What steps of the checked model, in bfloat16, have to read and compute."""

from text_generation_benchmark.shapes import LlamaShape

REHEARSED = LlamaShape(128, 320, 2, 4, 2, 4000, 1024, tied=False)
ITEM_BYTES = 2  # of bfloat16


def weight_bytes(shape: LlamaShape) -> int:
    """Read by every decode step: the matrices of all layers and the output head. Of the embedding, next to nothing."""
    return ITEM_BYTES * (shape.layers * shape.layer_weights + shape.head_weights)


def kv_bytes(shape: LlamaShape) -> int:
    """Keys and values of one token of context, read by every decode step of its row."""
    return ITEM_BYTES * shape.kv_numbers


def prefill_flops(shape: LlamaShape, tokens: int) -> int:
    """Of a whole prompt of `tokens` tokens. Only its last token needs logits."""
    products = 2 * tokens * shape.layers * shape.layer_weights + 2 * shape.head_weights
    return products + shape.layers * attention_flops(shape, tokens)


def attention_flops(shape: LlamaShape, tokens: int) -> int:
    """Of one layer over a whole prompt: each token's scores and weighted sum over itself and the tokens before it."""
    return 4 * shape.heads * shape.head_size * tokens * (tokens + 1) // 2
