"""Writes the keys of a GGUF file as the config.json from which the model was converted, as far as they tell it. So the
families' own readers check every value.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from text_generation_common.errors import ModelError
from text_generation_common.gguf.container import GgufHeader, shown, tensor_numbers
from text_generation_common.gguf.keys import Keys

Values = dict[str, Any]
# The fields of config.json that most families have, and where they are in the file.
FIELDS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
LAYER_NORM = "attention.layer_norm_epsilon"
EXPERT_SIZES = {
    "expert_feed_forward_length": "ffn_down_exps.weight",
    "expert_shared_feed_forward_length": "ffn_down_shexp.weight",
}
EXPERTS = {"num_experts_per_tok": "expert_used_count"}
GRANITE = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
# Layers after which llama.cpp takes a model for Gemma's of 27 billion numbers, whose scores have another factor.
GEMMA_27B = {"gemma2": 46, "gemma3": 62}


def nothing(keys: Keys) -> Values:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of llama.cpp, as a family of ours."""

    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)  # further fields of config.json, and their keys
    constants: Mapping[str, Any] = field(default_factory=dict)  # what llama.cpp's code knows, and files do not say
    further: Callable[[Keys], Values] = nothing
    pairs: bool = False  # rows of queries and keys that are turned together are neighbours, and were not before
    plus_one: bool = False  # norms hold 1 + w


def biases(keys: Keys) -> Values:
    return {"attention_bias": keys.has("blk.0.attn_q.bias"), "mlp_bias": keys.has("blk.0.ffn_up.bias")}


def attention_biases(keys: Keys) -> Values:
    return {"attention_bias": any(keys.has(f"blk.0.attn_{name}.bias") for name in ("q", "qkv"))}


def use_bias(keys: Keys) -> Values:
    return {"use_bias": keys.has("blk.0.ffn_up.bias")}


def llama(keys: Keys) -> Values:
    """Mistral's and Mixtral's models are of this architecture, too. Files do not have Mistral's window."""
    if not keys.get("expert_count", 0):
        return biases(keys)
    counts = {"num_local_experts": keys.get("expert_count"), "num_experts_per_tok": keys.get("expert_used_count")}
    return {"model_type": "mixtral", "sliding_window": None, **counts}


def qwen_moe(keys: Keys) -> Values:
    names = "num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"
    return {
        **dict(zip(names, _expert_sizes(keys), strict=True)),
        "mlp_only_layers": keys.in_layers("ffn_gate.weight"),
        "qkv_bias" if keys.architecture == "qwen2moe" else "attention_bias": keys.has("blk.0.attn_q.bias"),
    }


def phi2(keys: Keys) -> Values:
    """The converter writes four times the hidden size, whatever the size of the MLPs is."""
    keys.note("feed_forward_length")
    up = keys.header.tensors.get("blk.0.ffn_up.weight")
    return {} if up is None else {"intermediate_size": up.shape[0]}


def _expert_sizes(keys: Keys) -> tuple[Any, ...]:
    """Old files do not say the sizes of experts."""
    found = [keys.get("expert_count")]
    for key, tensor in EXPERT_SIZES.items():
        first = next(iter(keys.in_layers(tensor)), None)
        size = None if first is None else keys.header.tensors[f"blk.{first}.{tensor}"].shape[-1]
        found.append(keys.get(key, size))
    return tuple(found)


def olmoe(keys: Keys) -> Values:
    return {"num_experts": keys.get("expert_count"), **attention_biases(keys)}


def granite_moe(keys: Keys) -> Values:
    return {"num_local_experts": keys.get("expert_count"), **attention_biases(keys)}


def gemma2(keys: Keys) -> Values:
    head_size = keys.get("attention.key_length")
    is_27b = keys.layers == GEMMA_27B.get(keys.architecture)
    of_scores = keys.whole("embedding_length") / keys.size("attention.head_count") if is_27b else head_size
    return {"query_pre_attn_scalar": of_scores, **_windows(keys), **attention_biases(keys)}


def gemma3(keys: Keys) -> Values:
    rope = rope_fields(keys)
    local = keys.get("rope.freq_base_swa", 10000.0)
    theta = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "rope_local_base_freq": local}
    return {**gemma2(keys), **theta, "rope_parameters": None}


def _windows(keys: Keys, pattern: int = 0) -> Values:
    """The window, and which layers have it. Newer files list the layers, or say how many follow each other."""
    listed = keys.each("attention.sliding_window_pattern")
    found: Values = {"sliding_window": keys.get("attention.sliding_window") or None}
    if listed is not None:
        kinds = ["sliding_attention" if slides else "full_attention" for slides in listed[: keys.layers]]
        return {**found, "layer_types": kinds}
    number = keys.get("attention.sliding_window_pattern", pattern)
    return {**found, "sliding_window_pattern": number} if number else found


def windows(keys: Keys) -> Values:
    return {**_windows(keys), **attention_biases(keys)}


def olmo2(keys: Keys) -> Values:
    if not keys.get("attention.sliding_window", 0):
        return attention_biases(keys)
    rope = rope_fields(keys)
    in_windows = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", rope["rope_theta"])}
    ropes = {"full_attention": rope, "sliding_attention": in_windows}
    return {"model_type": "olmo3", **windows(keys), "rope_parameters": ropes}


def gpt_oss(keys: Keys) -> Values:
    keys.note("expert_gating_func", "feed_forward_length")
    rope = rope_fields(keys)
    # llama.cpp computes YaRN without whole dimensions as bounds.
    rope = {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope
    size = _expert_sizes(keys)[1]
    found = {"rope_parameters": rope, "num_local_experts": keys.get("expert_count"), "intermediate_size": size}
    return {**found, **windows(keys)}


def gpt_neox(keys: Keys) -> Values:
    is_parallel = keys.get("use_parallel_residual", True)
    return {"use_parallel_residual": is_parallel, **attention_biases(keys)}


def falcon(keys: Keys) -> Values:
    """The layout of 40B has two norms in each layer. A file does not tell 7B from 11B with one key head, which
    computes the same."""
    norms = 2 if keys.has("blk.0.attn_norm_2.weight") else 1
    heads = keys.get("attention.head_count_kv", 1)
    if norms == 1 and heads == 1:
        return {"new_decoder_architecture": False}
    return {"new_decoder_architecture": True, "num_kv_heads": heads, "num_ln_in_parallel_attn": norms}


def mpt(keys: Keys) -> Values:
    slope, clip = keys.number("attention.max_alibi_bias", 0.0), keys.number("attention.clamp_kqv", 0.0)
    attention = {"alibi": bool(slope), "alibi_bias_max": int(slope), "clip_qkv": clip or None}
    return {
        "attn_config": attention,
        "expansion_ratio": keys.whole("feed_forward_length") / keys.size("embedding_length"),
    }


SOFTCAP = {"final_logit_softcapping": "final_logit_softcapping"}
ATTENTION_SOFTCAP = {"attn_logit_softcapping": "attn_logit_softcapping"}
NORM_EPS = {"layer_norm_eps": LAYER_NORM}
GPT2_EPS = {"layer_norm_epsilon": LAYER_NORM}
COHERE = {"logit_scale": "logit_scale", **NORM_EPS}
# llama.cpp computes a router's scores over all experts, or over the chosen, whatever config.json has said.
OVER_ALL, OVER_CHOSEN = {"norm_topk_prob": False}, {"norm_topk_prob": True}
NO_ROPE = {"rope_parameters": None}
# By the name in general.architecture. All have fixtures that llama.cpp's converter has made.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", further=llama, pairs=True),
    "mistral3": Architecture("mistral", constants={"sliding_window": None}, pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", EXPERTS, OVER_ALL, qwen_moe),
    "qwen3": Architecture("qwen3", further=attention_biases),
    "qwen3moe": Architecture("qwen3_moe", EXPERTS, OVER_CHOSEN, qwen_moe),
    "phi2": Architecture("phi", NORM_EPS, further=phi2),
    "phi3": Architecture("phi3", further=_windows),
    "smollm3": Architecture("smollm3", further=biases, pairs=True),
    "granite": Architecture("granite", GRANITE, further=biases, pairs=True),
    "granitemoe": Architecture("granitemoe", {**GRANITE, **EXPERTS}, further=granite_moe, pairs=True),
    "gemma": Architecture("gemma", further=attention_biases, plus_one=True),
    "gemma2": Architecture("gemma2", {**SOFTCAP, **ATTENTION_SOFTCAP}, further=gemma2, plus_one=True),
    "gemma3": Architecture("gemma3_text", SOFTCAP, further=gemma3, plus_one=True),
    "olmo2": Architecture("olmo2", further=olmo2),
    "olmoe": Architecture("olmoe", EXPERTS, OVER_ALL, olmoe),
    "chatglm": Architecture("glm", further=attention_biases),
    "glm4": Architecture("glm4", further=attention_biases),
    "command-r": Architecture("cohere", COHERE, further=attention_biases),
    "cohere2": Architecture("cohere2", COHERE, further=windows),
    "gpt-oss": Architecture("gpt_oss", EXPERTS, further=gpt_oss),
    "gpt2": Architecture("gpt2", GPT2_EPS, NO_ROPE),
    "gptneox": Architecture("gpt_neox", NORM_EPS, further=gpt_neox),
    "starcoder": Architecture("gpt_bigcode", GPT2_EPS, {"multi_query": True, **NO_ROPE}),
    "starcoder2": Architecture("starcoder2", {"norm_epsilon": LAYER_NORM}, further=use_bias),
    "bloom": Architecture("bloom", {"seq_length": "context_length", **GPT2_EPS}, NO_ROPE),
    "falcon": Architecture("falcon", {"ffn_hidden_size": "feed_forward_length", **GPT2_EPS}, further=falcon),
    "mpt": Architecture("mpt", {"max_seq_len": "context_length", **GPT2_EPS}, NO_ROPE, mpt),
}
# Families whose ropes turn a part of each head only.
PARTIAL = frozenset({"chatglm", "glm4", "gptneox", "phi2", "phi3"})
# Families of ours that llama.cpp has no converter for: gptj, opt.


def architecture_of(header: GgufHeader) -> Architecture:
    """ModelError for an architecture that is not served."""
    name = header.text("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{header.path}: the architecture {shown(name)} is not supported in GGUF files, only"
            f" {', '.join(sorted(ARCHITECTURES))}: use the repository in safetensors from which the file was made"
        )
    return ARCHITECTURES[name]


def config_json(header: GgufHeader) -> Values:
    """ModelError for an architecture that is not served, and for a key that may change what is computed and is not
    known."""
    row, keys = architecture_of(header), Keys(header)
    if (embedding := header.tensors.get("token_embd.weight")) is None:
        raise header.error("it has no tensor token_embd.weight")
    found = {name: keys.get(key) for name, key in {**FIELDS, **row.fields}.items()}
    found |= {
        "model_type": row.model_type,
        "num_hidden_layers": keys.layers,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": rope_fields(keys),
        "eos_token_id": [],  # as the file says, and not as the family: generation_config.json has them
        "dtype": _type_of(header),
        **row.constants,
        **row.further(keys),
    }
    _check_heads(keys, found)
    keys.refuse_others()
    return {name: value for name, value in found.items() if value is not None or name == "sliding_window"}


def _type_of(header: GgufHeader) -> str:
    """The type of the model's numbers: that of its largest tensor; bfloat16 where this is quantized."""
    largest = max(header.tensors.values(), key=lambda tensor: math.prod(tensor.shape))
    return {"F32": "float32", "F16": "float16"}.get(largest.type, "bfloat16")


def _head_size(keys: Keys) -> int:
    hidden, heads = keys.whole("embedding_length"), keys.size("attention.head_count")
    queries = keys.header.tensors.get("blk.0.attn_q.weight")
    if keys.architecture == "chatglm" and queries is not None:  # files do not say the size of heads
        return queries.shape[0] // heads
    return keys.whole("attention.key_length", 0) or hidden // heads


def _check_heads(keys: Keys, found: Values) -> None:
    """Refuses heads of two sizes, and ropes of a part of a head where the family has none; notes such a part."""
    size = _head_size(keys)
    if keys.architecture == "chatglm":
        found["head_dim"] = size
    of_values, turned = keys.whole("attention.value_length", size), keys.whole("rope.dimension_count", size)
    if keys.architecture in PARTIAL and 0 < turned < size:
        found["partial_rotary_factor"] = min(math.nextafter(turned / size, 1), 1.0)
    elif turned != size:
        raise ModelError(f"{keys.header.path}: rope.dimension_count is {turned}, and must be the size of heads, {size}")
    if of_values != size:
        raise ModelError(f"{keys.header.path}: heads of values have the size {of_values}, and those of keys {size}")


def rope_fields(keys: Keys) -> Values:
    """rope_parameters of transformers 5."""
    trained = keys.get("rope.scaling.original_context_length")
    longest, kind = keys.get("context_length"), keys.get("rope.scaling.type", "none")
    found = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10000.0)}
    if (factors := _factors(keys, "rope_factors_short", "rope_factors_long")) is not None:
        attention = keys.get("rope.scaling.attn_factor", 1.0)
        return {**found, **_longrope(*factors, trained or longest, attention)}
    if (factors := _factors(keys, "rope_freqs", "rope_freqs")) is not None:
        return {**found, **_longrope(*factors, longest, 1.0)}
    factor = keys.get("rope.scaling.factor", 1.0)
    if kind == "linear" or (kind == "none" and keys.get("rope.scale_linear", 1.0) != 1.0):
        return {**found, "rope_type": "linear", "factor": keys.get("rope.scale_linear", factor)}
    if kind != "yarn":
        return found
    fields = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    further = {name: value for name, key in fields.items() if (value := keys.get(f"rope.scaling.{key}")) is not None}
    return {**found, **further, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}


def _longrope(short: list[float], long: list[float], trained: int, attention: float) -> Values:
    return {
        "rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention,
        "original_max_position_embeddings": trained,
    }  # fmt: skip


def _factors(keys: Keys, *names: str) -> tuple[list[float], list[float]] | None:
    """By what each frequency is divided; None if nothing is."""
    if not all(keys.has(f"{name}.weight") for name in names):
        return None
    pairs = keys.whole("rope.dimension_count", _head_size(keys)) // 2
    short, long = (tensor_numbers(keys.header, f"{name}.weight", pairs) for name in names)
    return None if {*short, *long} == {1.0} else (short, long)
