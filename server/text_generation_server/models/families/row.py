"""The type `Family`, which says how a family's config.json is read, and the names of fields that many families read."""

from collections.abc import Callable
from dataclasses import dataclass

from text_generation_server.models.architecture import Biases, ModelConfig
from text_generation_server.models.values import Fields


@dataclass(frozen=True, slots=True)
class Family:
    fields: frozenset[str]  # the fields of config.json that `read` reads
    read: Callable[[Fields], ModelConfig]


def field_names(names: str) -> frozenset[str]:
    return frozenset(names.split())


COMMON = field_names("""
    compression_config dtype eos_token_id head_dim hidden_act hidden_size intermediate_size max_position_embeddings
    model_type num_attention_heads num_hidden_layers num_key_value_heads quantization_config rms_norm_eps
    rope_parameters rope_scaling rope_theta tie_word_embeddings torch_dtype vocab_size
""")
BIASES = field_names("attention_bias mlp_bias")
WINDOWS = field_names("layer_types max_window_layers sliding_window use_sliding_window")
EVERY_BIAS = Biases(qkv=True, attention_output=True, mlp=True)
