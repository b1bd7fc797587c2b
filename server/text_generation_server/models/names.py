"""The names of a model's tensors in weights files. In the files, each name is followed by `.weight` or `.bias`."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class LayerNames:
    queries: str
    keys: str
    values: str
    attention_output: str
    gate: str
    up: str
    down: str
    attention_norm: str  # the norm before the attention
    mlp_norm: str  # the norm before the MLP

    def under(self, prefix: str) -> "LayerNames":
        """The same names with `prefix` and a dot before them."""
        return LayerNames(*(f"{prefix}.{name}" for name in astuple(self)))


@dataclass(frozen=True, slots=True)
class TensorNames:
    embedding: str
    norm: str  # the norm after the last layer
    head: str
    layers: str  # the prefix of all layers, before the number of the layer
    in_layer: LayerNames  # the names after the number

    def layer(self, number: int) -> LayerNames:
        return self.in_layer.under(f"{self.layers}.{number}")


LLAMA_NAMES = TensorNames(
    embedding="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layers="model.layers",
    in_layer=LayerNames(
        queries="self_attn.q_proj",
        keys="self_attn.k_proj",
        values="self_attn.v_proj",
        attention_output="self_attn.o_proj",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        attention_norm="input_layernorm",
        mlp_norm="post_attention_layernorm",
    ),
)
