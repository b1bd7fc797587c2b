"""The bytes that a step reads: its weights, and the keys and values of its rows."""

import math

from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.tensors import expert_shapes, shapes

NUMBER_BYTES = 2  # bfloat16


def weight_bytes(config: ModelConfig, experts_read: float | None = None) -> int:
    """All weights, except embeddings of which a step reads a few rows: that of an untied model, and positions. Of a
    mixture's experts `experts_read` are counted in each layer (not rounded: it may be a mean), or all if it is None.
    """
    return round(_numbers(config, experts_read, least_dimensions=1) * NUMBER_BYTES)


def matrix_numbers(config: ModelConfig, experts: float | None) -> int:
    """The numbers that each token is multiplied with, those of the head included. Of a mixture's experts, `experts`
    compute a token."""
    return round(_numbers(config, experts, least_dimensions=2))


def _numbers(config: ModelConfig, experts: float | None, least_dimensions: int) -> float:
    every_expert = set()
    for i in range(config.num_layers):
        if config.moe is not None and config.has_experts(i):
            names = config.names.layer(i)
            every_expert |= expert_shapes(config, config.moe, names).keys() - {f"{names.router}.weight"}
    share = 1.0
    if config.moe is not None and experts is not None:
        share = experts / config.moe.experts
    looked_up = {f"{config.names.positions}.weight"} if config.learned_positions else set()
    if not config.tie_word_embeddings:
        looked_up.add(f"{config.names.embedding}.weight")
    return sum(
        math.prod(size) * (share if name in every_expert else 1)
        for name, size in shapes(config).items()
        if name not in looked_up and len(size) >= least_dimensions
    )


def kv_bytes(config: ModelConfig, context: int, tokens: int = 1) -> int:
    """The keys and values that the last `tokens` tokens of a row of `context` tokens see, in all layers."""
    seen = sum(min(context, context if rule.window is None else rule.window + tokens - 1) for rule in config.rules)
    return seen * 2 * config.num_kv_heads * config.head_size * NUMBER_BYTES
