"""One changed field of config.json for each field that a family reads, and what is known of fields without effect."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

Raw = dict[str, Any]
GONE = object()  # as the value of a field: it is removed
THETA = 100.0
MEGATRON = "how Megatron fused and summed in training: transformers computes the same"
TRAINING = "for training only"

# For fields whose change is not the one that `change` makes of their value: the fields that are changed instead.
CHANGES: Mapping[str, Callable[[Raw], Raw]] = {
    **{
        name: lambda raw, name=name: {name: _other_activation(raw.get(name))}
        for name in ("activation", "activation_function", "hidden_act", "hidden_activation")
    },
    **{
        name: lambda raw, name=name: {name: 1.0}
        for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "rms_norm_eps")
    },
    **{
        name: lambda raw, name=name: {name: 2 if raw.get(name) != 2 else 1}
        for name in ("n_head", "n_heads", "num_attention_heads")
    },
    **{
        name: lambda raw, name=name: {name: {"quant_method": "aqlm"}}
        for name in ("compression_config", "quantization_config")
    },
    "dtype": lambda raw: {"dtype": "float16"},
    "torch_dtype": lambda raw: {"dtype": GONE, "torch_dtype": "float16"},
    "attn_config": lambda raw: {"attn_config": raw["attn_config"] | {"softmax_scale": 0.5}},
    "eos_token_id": lambda raw: {"eos_token_id": 9},
    **{name: lambda raw, name=name: {name: 3} for name in ("experts_per_token", "initial_context_length")},
    "expansion_ratio": lambda raw: {"expansion_ratio": 2},
    "embedding_fraction": lambda raw: {"embedding_fraction": 0.5},
    "ffn_hidden_size": lambda raw: {"ffn_hidden_size": 192},
    "head_dim": lambda raw: {"head_dim": 2 * _head_dim(raw)},
    "hidden_size": lambda raw: {"hidden_size": 2 * raw.get("hidden_size", 64)},
    "init_device": lambda raw: {"init_device": "meta"},
    "intermediate_size": lambda raw: {"intermediate_size": raw.get("intermediate_size", 160) + 32},
    "layer_types": lambda raw: {"layer_types": [_other_type(kind) for kind in raw.get("layer_types") or []] or GONE},
    "layer_switch": lambda raw: {"layer_switch": 3},
    "layerdrop": lambda raw: {"layerdrop": 0.5},
    "max_position_embeddings": lambda raw: {"max_position_embeddings": 256},
    "max_window_layers": lambda raw: {"layer_types": GONE, "max_window_layers": int(not raw.get("max_window_layers"))},
    "mlp_type": lambda raw: {"mlp_type": "gated"},
    "mlp_only_layers": lambda raw: {"mlp_only_layers": [] if raw["mlp_only_layers"] else [0]},
    "model_type": lambda raw: {"model_type": "unknown"},
    "n_embed": lambda raw: {"n_embed": 128},
    "n_inner": lambda raw: {"n_inner": 192},
    "no_rope_layer_interval": lambda raw: {"no_rope_layers": GONE, "no_rope_layer_interval": 3},
    "no_rope_layers": lambda raw: {"no_rope_layers": [1 - turns for turns in raw["no_rope_layers"]]},
    "norm_type": lambda raw: {"norm_type": "rmsnorm"},
    "num_hidden_layers": lambda raw: _with_one_layer_less(raw),
    "num_experts": lambda raw: {"num_local_experts": GONE, "num_experts": 4},
    "num_key_value_heads": lambda raw: {"num_key_value_heads": 1 if raw.get("num_key_value_heads") != 1 else 4},
    "num_kv_heads": lambda raw: {"num_kv_heads": 1},
    "num_ln_in_parallel_attn": lambda raw: {"num_ln_in_parallel_attn": 1},
    "num_local_experts": lambda raw: {"num_experts": GONE, "num_local_experts": 3},
    "original_max_position_embeddings": lambda raw: {"original_max_position_embeddings": 64},
    "order_of_interleaved_layers": lambda raw: {"order_of_interleaved_layers": "global_attn_first"},
    "position_embedding_type": lambda raw: {"position_embedding_type": "nope"},
    "partial_rotary_factor": lambda raw: _moved_out(raw, "partial_rotary_factor") | {"partial_rotary_factor": 0.25},
    "query_pre_attn_scalar": lambda raw: {"query_pre_attn_scalar": 16 * raw["query_pre_attn_scalar"]},
    "rope_local_base_freq": lambda raw: {"rope_parameters": GONE, "rope_local_base_freq": THETA},
    "rope_parameters": lambda raw: {"rope_parameters": (raw.get("rope_parameters") or {}) | {"rope_theta": THETA}},
    "rope_scaling": lambda raw: {"rope_parameters": GONE, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "rope_theta": lambda raw: _moved_out(raw, "rope_theta") | {"rope_theta": THETA},
    "rotary_dim": lambda raw: {"rotary_dim": 4},
    "rotary_emb_base": lambda raw: _moved_out(raw, "rope_theta") | {"rotary_emb_base": THETA},
    "rotary_pct": lambda raw: _moved_out(raw, "partial_rotary_factor") | {"rotary_pct": 0.5},
    "seq_length": lambda raw: {"seq_length": 256},
    "sliding_window": lambda raw: {"sliding_window": 3},
    "sliding_window_size": lambda raw: {"sliding_window_size": 3},
    "_sliding_window_pattern": lambda raw: {"_sliding_window_pattern": 2},
    "sliding_window_pattern": lambda raw: {"layer_types": GONE, "sliding_window_pattern": 2},
    **{
        name: lambda raw, name=name: {name: False}
        for name in (
            "use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding",
        )
    },
    "use_sliding_window": lambda raw: {"use_sliding_window": not raw.get("use_sliding_window")},
    **{
        name: lambda raw, name=name: {name: not raw.get(name, False)}
        for name in (
            "attention_bias", "bias_dropout_fusion", "masked_softmax_fusion", "mlp_bias", "offset_alibi", "rotary",
            "scale_attention_softmax_in_fp32", "scale_attn_weights", "skip_bias_add", "skip_bias_add_qkv",
            "slow_but_exact", "tie_word_embeddings",
        )
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Why a field that a family reads changes no logit."""

    reason: str
    attribute: str = ""  # the attribute of ModelConfig that changes instead
    families: frozenset[str] = frozenset()  # the families of which this is true; empty: all


NO_EFFECT: Mapping[str, NoEffect] = {
    "dtype": NoEffect("the type in which the model is computed, unless --dtype says it", "dtype"),
    "torch_dtype": NoEffect("the type in which the model is computed, unless --dtype says it", "dtype"),
    "eos_token_id": NoEffect("ends texts", "eos_token_ids"),
    "max_position_embeddings": NoEffect("the longest text", "max_positions"),
    "n_positions": NoEffect("the longest text", "max_positions", frozenset({"gptj"})),
    "seq_length": NoEffect("the longest text", "max_positions"),
    "max_seq_len": NoEffect("the longest text", "max_positions"),
    **dict.fromkeys(
        (
            "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv",
            "slow_but_exact",
        ),
        NoEffect(MEGATRON),
    ),
    **dict.fromkeys(("embedding_fraction", "emb_pdrop", "init_device", "layerdrop"), NoEffect(TRAINING)),
    "_sliding_window_pattern": NoEffect("transformers has made layer_types of it"),
    **dict.fromkeys(
        ("experts_per_token", "initial_context_length"),
        NoEffect("OpenAI's own name of a field that has another name here; transformers does not read it"),
    ),
    "learned_pos_emb": NoEffect("transformers has ALiBi in every MPT"),
    "num_key_value_heads": NoEffect("multi_query says it", families=frozenset({"gpt_bigcode"})),
    "rotary": NoEffect("transformers does not read it"),
    "scale_attn_weights": NoEffect("transformers does not read it for this family", families=frozenset({"gptj"})),
    "scale_attention_softmax_in_fp32": NoEffect("the softmax is computed in float32 always"),
    "original_max_position_embeddings": NoEffect("read with longrope"),
}  # fmt: skip


def change(model_type: str, name: str, raw: Raw) -> Raw | None:
    """The config with another value of the field `name`, or None where there is no rule for such a field."""
    family_name = spelling(model_type).get(name, name)
    if name in CHANGES:
        if name in ("mlp_only_layers", "no_rope_layers", "attn_config") and raw.get(name) is None:
            return None
        changes = CHANGES[name](raw)
    elif isinstance(value := raw.get(name), bool):
        changes = {name: not value}
    elif isinstance(value, int):
        changes = {name: value - 1 if value > 1 else value + 1}
    elif isinstance(value, float):
        changes = {name: 3 * value or 0.5}
    elif name in family_sizes(raw):
        changes = {name: 2}
    else:
        return None
    without = {key for key, value in changes.items() if value is GONE}
    if family_name != name and family_name in raw:  # the family's own name of the field would win
        without.add(family_name)
    changed = {key: value for key, value in raw.items() if key not in without}
    return changed | {key: value for key, value in changes.items() if value is not GONE}


def family_sizes(raw: Raw) -> set[str]:
    """Sizes that a family's files have under another name."""
    return {"num_hidden_layers", "vocab_size"} - raw.keys()


def _other_activation(name: str | None) -> str:
    if name is not None and name.startswith("gelu"):
        return "silu"
    return "gelu" if name == "relu" else "relu"


def _head_dim(raw: Raw) -> int:
    size: int = raw.get("head_dim") or raw.get("hidden_size", 64) // raw.get("num_attention_heads", 4)
    return size


def _with_one_layer_less(raw: Raw) -> Raw:
    """One layer less, also in lists that have a value for each layer."""
    layers = raw.get("num_hidden_layers", 3) - 1
    lists = {name: raw[name][:layers] for name in ("layer_types", "no_rope_layers") if raw.get(name)}
    return {"num_hidden_layers": layers, **lists}


def _other_type(kind: str) -> str:
    return "full_attention" if kind == "sliding_attention" else "sliding_attention"


def _moved_out(raw: Raw, name: str) -> Raw:
    """rope_parameters without the field `name`, which is given outside, as in files of transformers before 5."""
    inner = {key: value for key, value in (raw.get("rope_parameters") or {}).items() if key != name}
    return {"rope_parameters": inner or GONE}


@cache
def spelling(model_type: str) -> Mapping[str, str]:
    """The family's own names of common fields, as transformers knows them."""
    from transformers import AutoConfig

    return dict(type(AutoConfig.for_model(model_type)).attribute_map)


@cache
def transformers_reads(model_type: str, name: str) -> bool:
    """Whether the config class of transformers has a field of this name."""
    from transformers import AutoConfig

    names = AutoConfig.for_model(model_type).to_dict()
    return name in names or name in spelling(model_type)
