"""The families of models that are served, a row for each: the facts about the family, and the class that computes its
models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from text_generation_server.models.architecture import ModelConfig
from text_generation_server.models.llama import Llama
from text_generation_server.models.loading import Loader
from text_generation_server.models.model import Model
from text_generation_server.models.names import LLAMA_NAMES, TensorNames
from text_generation_server.platforms import Platform


@dataclass(frozen=True, slots=True)
class Family:
    fields: frozenset[str]  # the fields of config.json that `read_config` reads
    names: TensorNames
    build: Callable[[ModelConfig, Platform, Loader, int], Model]  # the last argument is max_total_tokens


LLAMA_FIELDS = """
    attention_bias compression_config dtype eos_token_id head_dim hidden_act hidden_size intermediate_size
    max_position_embeddings mlp_bias model_type num_attention_heads num_hidden_layers num_key_value_heads
    quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings torch_dtype vocab_size
"""


FAMILIES: Mapping[str, Family] = {  # families by the model_type of config.json
    "llama": Family(frozenset(LLAMA_FIELDS.split()), LLAMA_NAMES, Llama),
}
