"""The names of a model's tensors in weights files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any


class QkvLayout(Enum):
    """The order of the outputs of queries, keys and values, with H query heads and G key heads."""

    blocks = "all queries, all keys, all values"
    groups = "for each key head: the H / G queries that see it, the key, the value"


class ExpertLayout(Enum):
    """The tensors of E experts, with I inner numbers each."""

    apart = "three for each expert, whose number stands for {}: gate and up [I, H], down [H, I]"
    merged = "three for all experts: gate and up [E, I, H]; down [E, H, I]. Biases are called .bias"
    stacked = "two for all experts: gates, then ups [E, 2I, H]; down [E, H, I]"
    # Names without `.weight`, and biases [E, 2I] and [E, H] that are called `_bias`. Codes are of [E, 2I, H] and
    # [E, H, I].
    turned = "two for all experts: gates and ups in turns [E, H, 2I]; down [E, I, H]"


def expert_name(name: str, number: int) -> str:
    """The name of an expert's layer, of a name of `LayerNames`. Where all experts are in the same tensors, it is not a
    name in the files, but `input_linear[3]`."""
    return name.format(number) if "{}" in name else f"{name}[{number}]"


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

    def but(self, **layer: str) -> "TensorNames":
        """Other names in layers."""
        return replace(self, in_layer=replace(self.in_layer, **layer))

    def as_in(self, has: Callable[[str], bool]) -> "TensorNames":
        """These names, or one of their variants, whichever the files have: without the first word (model, transformer,
        gpt_neox), which files leave out that were written without the head; and in a model of texts and images, as
        transformers has written it until version 4.51 and since."""
        first = self.embedding.partition(".")[0] + "."
        # Each prefix that the names of tensors may have in place of `first`, with the prefix under which a model of
        # texts and images has its text model; "" in a model of texts.
        older, newer = "language_model.", "model.language_model."
        starts = {first: "", "": "", older + first: older, newer: newer}
        embedding = self.embedding.removeprefix(first)
        start = next((start for start in starts if has(f"{start}{embedding}.weight")), first)
        moved = ("embedding", "norm", "layers", "positions", "embedding_norm")
        old: dict[str, str] = {field: getattr(self, field) for field in moved}
        names: dict[str, Any] = {field: name and start + name.removeprefix(first) for field, name in old.items()}
        head = older + self.head if starts[start] == older else self.head
        return replace(self, **names, head=head, within=starts[start])


def _layer(qkv: str, output: str, up: str, down: str, attention_norm: str, mlp_norm: str, gate: str = "") -> LayerNames:
    """`qkv`: a name with {} in the place of q, k and v, or that of one tensor for all of them."""
    queries, keys, values = (qkv.format(kind) for kind in "qkv")
    return LayerNames(
        queries=queries,
        keys=keys,
        values=values,
        attention_output=output,
        gate=gate,
        up=up,
        down=down,
        attention_norm=attention_norm,
        mlp_norm=mlp_norm,
    )


def _gated_mlp(kind: str, prefix: str) -> dict[str, str]:
    return {f"{kind}_{role}": f"{prefix}.{role}_proj" for role in ("gate", "up", "down")}


_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_LLAMA_LAYER = _layer(
    "self_attn.{}_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", gate="mlp.gate_proj", **_NORMS
)
_OPT_NORMS = {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}
_OPT_LAYER = _layer("self_attn.{}_proj", "self_attn.out_proj", "fc1", "fc2", **_OPT_NORMS)
_GPT2_NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
_GPT2_LAYER = _layer("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", **_GPT2_NORMS)
_GPTJ_LAYER = _layer("attn.{}_proj", "attn.out_proj", "mlp.fc_in", "mlp.fc_out", **_GPT2_NORMS)
_MPT_NORMS = {"attention_norm": "norm_1", "mlp_norm": "norm_2"}
_MPT_LAYER = _layer("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj", **_MPT_NORMS)
_MEGATRON = {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h", **_NORMS}
_NEOX_LAYER = _layer("attention.query_key_value", "attention.dense", **_MEGATRON)
_FALCON_LAYER = _layer("self_attention.query_key_value", "self_attention.dense", **_MEGATRON)

LLAMA = TensorNames("model.embed_tokens", "model.norm", "lm_head", "model.layers", _LLAMA_LAYER)
_OPT = TensorNames(
    "model.decoder.embed_tokens", "model.decoder.final_layer_norm", "lm_head", "model.decoder.layers", _OPT_LAYER
)
_GPTJ = TensorNames("transformer.wte", "transformer.ln_f", "lm_head", "transformer.h", _GPTJ_LAYER)
_GPT2 = replace(_GPTJ, in_layer=_GPT2_LAYER, positions="transformer.wpe")
_NEOX = TensorNames("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out", "gpt_neox.layers", _NEOX_LAYER)
_FALCON = TensorNames(
    "transformer.word_embeddings", "transformer.ln_f", "lm_head", "transformer.h", _FALCON_LAYER, qkv=QkvLayout.groups
)

_HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
_POST_NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_GATE_UP = {"gate": "mlp.gate_up_proj", "up": "mlp.gate_up_proj"}
_QWEN_EXPERTS = {"router": "mlp.gate", **_gated_mlp("expert", "mlp.experts.{}")}
_GEMMA2 = LLAMA.but(**_POST_NORMS, mlp_norm="pre_feedforward_layernorm")
_OLMO2 = LLAMA.but(**_POST_NORMS, **_HEAD_NORMS, attention_norm="", mlp_norm="")
_QWEN3 = LLAMA.but(**_HEAD_NORMS)
_GPT_OSS = LLAMA.but(
    router="mlp.router", expert_up="mlp.experts.gate_up_proj", expert_down="mlp.experts.down_proj",
    sinks="self_attn.sinks",
)  # fmt: skip
_MIXTRAL = LLAMA.but(
    router="block_sparse_moe.gate", expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3", expert_down="block_sparse_moe.experts.{}.w2",
)  # fmt: skip
_GRANITE_MOE = LLAMA.but(
    router="block_sparse_moe.router.layer", expert_up="block_sparse_moe.input_linear",
    expert_down="block_sparse_moe.output_linear",
)  # fmt: skip
_SHARED = {"shared_score": "mlp.shared_expert_gate", **_gated_mlp("shared", "mlp.shared_expert")}
_PHI = LLAMA.but(attention_output="self_attn.dense", gate="", up="mlp.fc1", down="mlp.fc2")

NAMES: Mapping[str, TensorNames] = {  # by the model_type of config.json; all others have Llama's
    "bloom": replace(_FALCON, embedding_norm="transformer.word_embeddings_layernorm"),
    "falcon": _FALCON,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2.but(**_HEAD_NORMS),
    "glm": LLAMA.but(**_GATE_UP),
    "glm4": LLAMA.but(**_GATE_UP, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"),
    "gpt2": replace(_GPT2, transposed=True),
    "gpt_bigcode": _GPT2,
    "gpt_neox": replace(_NEOX, qkv=QkvLayout.groups),
    "gpt_oss": replace(_GPT_OSS, experts=ExpertLayout.turned),
    "gptj": _GPTJ,
    "granitemoe": replace(_GRANITE_MOE, experts=ExpertLayout.stacked),
    "mixtral": _MIXTRAL,
    "mpt": TensorNames("transformer.wte", "transformer.norm_f", "lm_head", "transformer.blocks", _MPT_LAYER),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _QWEN3.but(**_QWEN_EXPERTS),
    "opt": replace(_OPT, positions="model.decoder.embed_positions"),
    "phi": replace(_PHI, norm="model.final_layernorm"),
    "phi3": LLAMA.but(**dict.fromkeys(("queries", "keys", "values"), "self_attn.qkv_proj"), **_GATE_UP),
    "qwen2_moe": LLAMA.but(**_QWEN_EXPERTS, **_SHARED),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3.but(**_QWEN_EXPERTS),
    "starcoder2": LLAMA.but(gate="", up="mlp.c_fc", down="mlp.c_proj"),
}
