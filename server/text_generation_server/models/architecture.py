"""The facts from which a model is built: its sizes, and the ways in which it differs from other models."""

from dataclasses import dataclass

import torch

from text_generation_server.layers.rotary import RopeScaling
from text_generation_server.models.names import TensorNames


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    names: TensorNames
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int  # tokens of the longest sequence, rope scaling included
    rope_theta: float
    rope_scaling: RopeScaling
    rope_base_positions: int  # max_position_embeddings: where `dynamic` scaling begins
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    unknown_fields: tuple[str, ...] = ()  # unknown fields of config.json, which have no effect
