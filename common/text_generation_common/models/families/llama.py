"""Llama, and families that differ from it in a few values; mixtures of experts among them."""

from dataclasses import replace

from text_generation_common.models.architecture import Biases, ClampedGate, ModelConfig, Multipliers
from text_generation_common.models.reading import (
    MAX_WIDTH,
    attention_biases,
    experts,
    family,
    llama_like,
    qwen_experts,
    read_window,
    rms_norm,
    used_window,
    with_one_window,
    with_rules,
    with_windows,
    with_windows_from,
)
from text_generation_common.models.rope_config import MAX_POSITIONS, RopeFacts
from text_generation_common.models.values import Fields

GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


@family("llama")
def llama(fields: Fields) -> ModelConfig:
    return llama_like(fields)


@family("mistral", max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)
def mistral(fields: Fields) -> ModelConfig:
    return with_one_window(fields, llama_like(fields, Biases()))


@family("qwen2", max_position_embeddings=32768, num_key_value_heads=32)
def qwen2(fields: Fields) -> ModelConfig:
    return with_windows_from(fields, llama_like(fields, Biases(qkv=True)))


@family("qwen3", max_position_embeddings=32768, num_key_value_heads=32, head_dim=128)
def qwen3(fields: Fields) -> ModelConfig:
    return with_windows_from(fields, llama_like(fields, attention_biases(fields), query_key_norm=True))


@family(
    "phi3", max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5, eos_token_id=32000
)
def phi3(fields: Fields) -> ModelConfig:
    rope = RopeFacts(partial=True, trained_beside=True, aliases=(("su", "longrope"), ("yarn", "longrope")))
    return with_one_window(fields, llama_like(fields, Biases(), rope))


@family(
    "smollm3", max_position_embeddings=32768, num_key_value_heads=4, tie_word_embeddings=True, eos_token_id=128001,
    rope_theta=2000000.0,
)  # fmt: skip
def smollm3(fields: Fields) -> ModelConfig:
    fields.note("max_window_layers")  # transformers does not read it
    config = llama_like(fields)
    count, interval = config.num_layers, fields.whole("no_rope_layer_interval", 1, MAX_POSITIONS, 4)
    turns = fields.bits("no_rope_layers", count, [int((i + 1) % interval != 0) for i in range(count)])
    rules = tuple(rule if turn else replace(rule, rope=None) for rule, turn in zip(config.rules, turns, strict=True))
    return with_windows(fields, replace(config, rules=rules), used_window(fields), lambda i: not turns[i])


@family("granite")
def granite(fields: Fields, biases: Biases | None = None) -> ModelConfig:
    attention, embedding, residual, logits = (
        fields.factor(name, 1.0)
        for name in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    )
    multipliers = Multipliers(embedding, residual=residual, logits=1 / logits)
    return with_rules(llama_like(fields, biases, multipliers=multipliers), scale=attention)


@family(
    "mixtral", max_position_embeddings=131072, num_key_value_heads=8, rms_norm_eps=1e-5, num_local_experts=8,
    num_experts_per_tok=2,
)  # fmt: skip
def mixtral(fields: Fields) -> ModelConfig:
    return with_one_window(fields, llama_like(fields, Biases(), moe=experts(fields)))


@family(
    "qwen2_moe", max_position_embeddings=32768, num_key_value_heads=16, num_experts=60, num_experts_per_tok=4,
    moe_intermediate_size=1408, shared_expert_intermediate_size=5632, qkv_bias=True, sliding_window=4096,
)  # fmt: skip
def qwen2_moe(fields: Fields) -> ModelConfig:
    config = llama_like(fields, Biases(qkv=fields.flag("qkv_bias")))
    shared = fields.whole("shared_expert_intermediate_size", 1, MAX_WIDTH)
    config = replace(config, moe=replace(qwen_experts(fields, config.num_layers), shared_size=shared))
    end = fields.whole("max_window_layers", 0, MAX_POSITIONS, 28)
    return with_windows(fields, config, used_window(fields), lambda i: i % 2 == 0 and i < end)


@family(
    "qwen3_moe", max_position_embeddings=32768, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768,
)  # fmt: skip
def qwen3_moe(fields: Fields) -> ModelConfig:
    fields = fields.with_names(num_experts="num_local_experts")
    config = llama_like(fields, attention_biases(fields), query_key_norm=True)
    return with_rules(replace(config, moe=qwen_experts(fields, config.num_layers)), window=used_window(fields))


@family("granitemoe", num_local_experts=8, num_experts_per_tok=2)
def granitemoe(fields: Fields) -> ModelConfig:
    moe = experts(fields)
    return replace(granite(fields, attention_biases(fields)), moe=moe)


@family(
    "olmoe", max_position_embeddings=4096, num_experts=64, num_experts_per_tok=8, rms_norm_eps=1e-5, eos_token_id=50279
)
def olmoe(fields: Fields) -> ModelConfig:
    fields = fields.with_names(num_experts="num_local_experts")
    config = llama_like(fields, attention_biases(fields), heads_normed_together=True)
    return replace(config, moe=experts(fields, "num_experts", over_chosen=fields.flag("norm_topk_prob")))


@family(
    "gpt_oss", max_position_embeddings=131072, num_key_value_heads=8, head_dim=64, num_local_experts=128,
    num_experts_per_tok=4, attention_bias=True, sliding_window=128, rope_theta=150000.0, rms_norm_eps=1e-5,
)  # fmt: skip
def gpt_oss(fields: Fields) -> ModelConfig:
    fields.note("experts_per_token", "initial_context_length")  # these repeat other fields
    if not (fields.has("rope_parameters") or fields.has("rope_scaling")):
        fields = fields.with_value("rope_parameters", GPT_OSS_ROPE)
    biases, norm = attention_biases(fields, experts=True), rms_norm(fields, rounded_last=True)
    config = with_rules(llama_like(fields, biases, norm=norm), sinks=True)
    clamped = ClampedGate(fields.factor("swiglu_limit", 7.0), fields.factor("swiglu_alpha", 1.702))
    config = replace(config, moe=replace(experts(fields), clamped=clamped))
    return with_windows(fields, config, read_window(fields), lambda i: i % 2 == 0)
