"""The names of a model's tensors in weights files."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any


class QkvLayout(Enum):
    """The order of the outputs of queries, keys and values, with H query heads and G key heads."""

    blocks = "all queries, all keys, all values"
    groups = "for each key head: the H / G queries that see it, the key, the value"


class ExpertLayout(Enum):
    """The tensors of E experts, with I inner numbers each. In the last two layouts the files have the names without
    `.weight`, and biases [E, 2I] and [E, H] are called `_bias`."""

    apart = "three for each expert, whose number stands for {}: gate and up [I, H], down [H, I]"
    stacked = "two for all experts: gates, then ups [E, 2I, H]; down [E, H, I]"
    turned = "two for all experts: gates and ups in turns [E, H, 2I]; down [E, I, H]"
    mxfp4 = "the same in blocks of 32 inputs: _blocks [E, 2I, H / 32, 16] and [E, H, I / 32, 16], _scales without 16"


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
    attention_norm: str  # the norm before the attention; "": there is none
    mlp_norm: str  # the norm before the MLP; "": there is none
    attention_post_norm: str = ""  # the norm of the attention's result; "": there is none
    mlp_post_norm: str = ""
    router: str = ""  # mixtures of experts
    expert_gate: str = ""  # "": in the tensor of ups
    expert_up: str = ""
    expert_down: str = ""
    query_norm: str = ""
    key_norm: str = ""
    shared_gate: str = ""  # the MLP that computes every token, beside its experts
    shared_up: str = ""
    shared_down: str = ""
    shared_score: str = ""  # [1, H]: its product with the input, between 0 and 1 by a sigmoid, multiplies that MLP
    sinks: str = ""  # without .weight

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
    embedding_norm: str = ""  # the norm of the tokens' embeddings; "": there is none
    qkv: QkvLayout = QkvLayout.blocks
    experts: ExpertLayout = ExpertLayout.apart
    transposed: bool = False  # the weights of linear layers in layers are [inputs, outputs]
    # The beginning of the layers' names in a model of texts and images, whose other tensors are not read.
    within: str = ""

    def layer(self, number: int) -> LayerNames:
        return self.in_layer.under(f"{self.layers}.{number}")

    def as_in(self, has: Callable[[str], bool]) -> "TensorNames":
        """These names, or one of their variants, whichever the files have: without the first word (model, transformer,
        gpt_neox), which files leave out that were written without the head; and in a model of texts and images, as
        transformers has written it until version 4.51 and since. Experts lie as in the files."""
        first = self.embedding.partition(".")[0] + "."
        variants = (
            self,
            self._renamed(lambda name: name.removeprefix(first)),
            replace(
                self._renamed(lambda name: f"language_model.{name}"), head=f"language_model.{self.head}",
                within="language_model.",
            ),
            replace(
                self._renamed(lambda name: f"model.language_model.{name.removeprefix(first)}"),
                within="model.language_model.",
            ),
        )  # fmt: skip
        found = next((names for names in variants if has(f"{names.embedding}.weight")), self)
        if found.experts is ExpertLayout.turned and has(f"{found.layer(0).expert_up}_blocks"):
            return replace(found, experts=ExpertLayout.mxfp4)
        return found

    def _renamed(self, change: Callable[[str], str]) -> "TensorNames":
        """All names but the head's, changed."""
        fields = ("embedding", "norm", "layers", "positions", "embedding_norm")
        old = {field: getattr(self, field) for field in fields}
        changed: dict[str, Any] = {field: name and change(name) for field, name in old.items()}
        return replace(self, **changed)


_LLAMA_LAYER = LayerNames(
    queries="self_attn.q_proj", keys="self_attn.k_proj", values="self_attn.v_proj",
    attention_output="self_attn.o_proj", gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj",
    attention_norm="input_layernorm", mlp_norm="post_attention_layernorm",
)  # fmt: skip
LLAMA_NAMES = TensorNames("model.embed_tokens", "model.norm", "lm_head", "model.layers", _LLAMA_LAYER)


def _llama_but(**layer: str) -> TensorNames:
    return replace(LLAMA_NAMES, in_layer=replace(_LLAMA_LAYER, **layer))


_HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
_GATE_UP = {"gate": "mlp.gate_up_proj", "up": "mlp.gate_up_proj"}
QWEN3_NAMES = _llama_but(**_HEAD_NORMS)
PHI3_NAMES = _llama_but(**dict.fromkeys(("queries", "keys", "values"), "self_attn.qkv_proj"), **_GATE_UP)
_AFTER = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
GEMMA2_NAMES = _llama_but(**_AFTER, mlp_norm="pre_feedforward_layernorm")
GEMMA3_NAMES = _llama_but(**_AFTER, **_HEAD_NORMS, mlp_norm="pre_feedforward_layernorm")
OLMO2_NAMES = _llama_but(**_AFTER, **_HEAD_NORMS, attention_norm="", mlp_norm="")
GLM4_NAMES = _llama_but(
    **_GATE_UP, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"
)  # fmt: skip
PHI_NAMES = replace(
    _llama_but(attention_output="self_attn.dense", gate="", up="mlp.fc1", down="mlp.fc2"), norm="model.final_layernorm"
)
STARCODER2_NAMES = _llama_but(gate="", up="mlp.c_fc", down="mlp.c_proj")
MIXTRAL_NAMES = _llama_but(
    router="block_sparse_moe.gate", expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3", expert_down="block_sparse_moe.experts.{}.w2",
)  # fmt: skip
_QWEN_EXPERTS = {
    "router": "mlp.gate", "expert_gate": "mlp.experts.{}.gate_proj", "expert_up": "mlp.experts.{}.up_proj",
    "expert_down": "mlp.experts.{}.down_proj",
}  # fmt: skip
QWEN3_MOE_NAMES = _llama_but(**_HEAD_NORMS, **_QWEN_EXPERTS)
QWEN2_MOE_NAMES = _llama_but(
    **_QWEN_EXPERTS, shared_gate="mlp.shared_expert.gate_proj", shared_up="mlp.shared_expert.up_proj",
    shared_down="mlp.shared_expert.down_proj", shared_score="mlp.shared_expert_gate",
)  # fmt: skip
GRANITE_MOE_NAMES = replace(
    _llama_but(
        router="block_sparse_moe.router.layer", expert_up="block_sparse_moe.input_linear",
        expert_down="block_sparse_moe.output_linear",
    ),
    experts=ExpertLayout.stacked,
)  # fmt: skip
GPT_OSS_NAMES = replace(
    _llama_but(
        router="mlp.router", expert_up="mlp.experts.gate_up_proj", expert_down="mlp.experts.down_proj",
        sinks="self_attn.sinks",
    ),
    experts=ExpertLayout.turned,
)  # fmt: skip

_GPT2_LAYER = LayerNames(
    queries="attn.c_attn", keys="attn.c_attn", values="attn.c_attn", attention_output="attn.c_proj", gate="",
    up="mlp.c_fc", down="mlp.c_proj", attention_norm="ln_1", mlp_norm="ln_2",
)  # fmt: skip
BIGCODE_NAMES = TensorNames(
    "transformer.wte", "transformer.ln_f", "lm_head", "transformer.h", _GPT2_LAYER, positions="transformer.wpe",
)  # fmt: skip
GPT2_NAMES = replace(BIGCODE_NAMES, transposed=True)
_GPTJ_LAYER = replace(
    _GPT2_LAYER, queries="attn.q_proj", keys="attn.k_proj", values="attn.v_proj", attention_output="attn.out_proj",
    up="mlp.fc_in", down="mlp.fc_out",
)  # fmt: skip
GPTJ_NAMES = replace(BIGCODE_NAMES, in_layer=_GPTJ_LAYER, positions="")

_NEOX_QKV = "attention.query_key_value"
_NEOX_LAYER = LayerNames(
    queries=_NEOX_QKV, keys=_NEOX_QKV, values=_NEOX_QKV, attention_output="attention.dense", gate="",
    up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
)  # fmt: skip
NEOX_NAMES = TensorNames(
    "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out", "gpt_neox.layers", _NEOX_LAYER,
    qkv=QkvLayout.groups,
)  # fmt: skip

_BLOOM_QKV = "self_attention.query_key_value"
_BLOOM_LAYER = replace(
    _NEOX_LAYER, queries=_BLOOM_QKV, keys=_BLOOM_QKV, values=_BLOOM_QKV, attention_output="self_attention.dense"
)
FALCON_NAMES = TensorNames(
    "transformer.word_embeddings", "transformer.ln_f", "lm_head", "transformer.h", _BLOOM_LAYER, qkv=QkvLayout.groups
)
BLOOM_NAMES = replace(FALCON_NAMES, embedding_norm="transformer.word_embeddings_layernorm")
_OPT_LAYER = replace(
    _LLAMA_LAYER, attention_output="self_attn.out_proj", gate="", up="fc1", down="fc2",
    attention_norm="self_attn_layer_norm", mlp_norm="final_layer_norm",
)  # fmt: skip
OPT_NAMES = TensorNames(
    "model.decoder.embed_tokens", "model.decoder.final_layer_norm", "lm_head", "model.decoder.layers", _OPT_LAYER,
    positions="model.decoder.embed_positions",
)  # fmt: skip
_MPT_LAYER = LayerNames(
    queries="attn.Wqkv", keys="attn.Wqkv", values="attn.Wqkv", attention_output="attn.out_proj", gate="",
    up="ffn.up_proj", down="ffn.down_proj", attention_norm="norm_1", mlp_norm="norm_2",
)  # fmt: skip
MPT_NAMES = TensorNames("transformer.wte", "transformer.norm_f", "lm_head", "transformer.blocks", _MPT_LAYER)
