"""The names of a model's tensors in weights files."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum


class QkvLayout(Enum):
    """The order of the outputs of queries, keys and values, with H query heads and G key heads."""

    blocks = "all queries, all keys, all values"
    groups = "for each key head: the H / G queries that see it, the key, the value"


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Each name is followed by `.weight` in the files, or by `.bias`. Layers of the same name share a tensor, which
    holds the outputs of one after those of the other, in the order of these fields."""

    queries: str
    keys: str
    values: str
    attention_output: str
    gate: str  # "": there is no gate
    up: str
    down: str
    attention_norm: str  # the norm before the attention
    mlp_norm: str  # the norm before the MLP
    query_norm: str = ""  # "": there is none
    key_norm: str = ""

    def under(self, prefix: str) -> "LayerNames":
        """The names with a prefix and a dot in front."""
        names = {field.name: getattr(self, field.name) for field in fields(self)}
        return LayerNames(**{key: name and f"{prefix}.{name}" for key, name in names.items()})


@dataclass(frozen=True, slots=True)
class TensorNames:
    embedding: str
    norm: str  # the norm after the last layer
    head: str
    layers: str  # the prefix of all layers; the number of the layer follows it
    in_layer: LayerNames  # names that follow the number
    positions: str = ""  # the embedding of positions; "": there is none
    qkv: QkvLayout = QkvLayout.blocks
    transposed: bool = False  # the weights of linear layers in layers are [inputs, outputs]
    optional_prefix: str = ""  # the beginning of the names that some files leave out

    def layer(self, number: int) -> LayerNames:
        return self.in_layer.under(f"{self.layers}.{number}")

    def as_in(self, has: Callable[[str], bool]) -> "TensorNames":
        """These names, without their optional prefix if the files leave it out."""
        prefix = self.optional_prefix
        if not prefix or has(f"{self.embedding}.weight"):
            return self
        prefixed = ("embedding", "norm", "layers", "positions")
        return replace(self, **{name: getattr(self, name).removeprefix(prefix) for name in prefixed})


_LLAMA_LAYER = LayerNames(
    queries="self_attn.q_proj",
    keys="self_attn.k_proj",
    values="self_attn.v_proj",
    attention_output="self_attn.o_proj",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
)
LLAMA_NAMES = TensorNames("model.embed_tokens", "model.norm", "lm_head", "model.layers", _LLAMA_LAYER)
QWEN3_NAMES = replace(
    LLAMA_NAMES, in_layer=replace(_LLAMA_LAYER, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
)
_PHI3_QKV, _PHI3_GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
PHI3_NAMES = replace(
    LLAMA_NAMES,
    in_layer=replace(
        _LLAMA_LAYER, queries=_PHI3_QKV, keys=_PHI3_QKV, values=_PHI3_QKV, gate=_PHI3_GATE_UP, up=_PHI3_GATE_UP
    ),
)
_GPT2_LAYER = LayerNames(
    queries="attn.c_attn",
    keys="attn.c_attn",
    values="attn.c_attn",
    attention_output="attn.c_proj",
    gate="",
    up="mlp.c_fc",
    down="mlp.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
)
BIGCODE_NAMES = TensorNames(
    embedding="transformer.wte",
    norm="transformer.ln_f",
    head="lm_head",
    layers="transformer.h",
    in_layer=_GPT2_LAYER,
    positions="transformer.wpe",
    optional_prefix="transformer.",
)
GPT2_NAMES = replace(BIGCODE_NAMES, transposed=True)
GPTJ_NAMES = replace(
    BIGCODE_NAMES,
    in_layer=replace(
        _GPT2_LAYER,
        queries="attn.q_proj",
        keys="attn.k_proj",
        values="attn.v_proj",
        attention_output="attn.out_proj",
        up="mlp.fc_in",
        down="mlp.fc_out",
    ),
    positions="",
    optional_prefix="",
)
_NEOX_QKV = "attention.query_key_value"
NEOX_NAMES = TensorNames(
    embedding="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    layers="gpt_neox.layers",
    in_layer=LayerNames(
        queries=_NEOX_QKV,
        keys=_NEOX_QKV,
        values=_NEOX_QKV,
        attention_output="attention.dense",
        gate="",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        attention_norm="input_layernorm",
        mlp_norm="post_attention_layernorm",
    ),
    qkv=QkvLayout.groups,
)
PHI_NAMES = replace(
    LLAMA_NAMES,
    norm="model.final_layernorm",
    in_layer=replace(_LLAMA_LAYER, attention_output="self_attn.dense", gate="", up="mlp.fc1", down="mlp.fc2"),
)
STARCODER2_NAMES = replace(LLAMA_NAMES, in_layer=replace(_LLAMA_LAYER, gate="", up="mlp.c_fc", down="mlp.c_proj"))
