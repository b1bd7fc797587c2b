"""Llama, families that differ from it in a few values (mixtures of experts among them), and families whose norms stand
in other places, or are of another kind: Gemma, OLMo, GLM-4, Cohere.
"""

from dataclasses import replace
from typing import Any

from text_generation_common.models.architecture import Biases, Branches, ClampedGate, ModelConfig, Multipliers
from text_generation_common.models.reading import (
    MAX_WIDTH,
    attention_biases,
    experts,
    family,
    layer_norm,
    llama_like,
    qwen_experts,
    read_window,
    rms_norm,
    used_window,
    with_one_window,
    with_ropes,
    with_rules,
    with_window_pattern,
    with_windows,
    with_windows_from,
)
from text_generation_common.models.rope_config import LLAMA_ROPE, MAX_POSITIONS, MAX_THETA, RopeFacts
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


# Families whose norms stand in other places, or are of another kind, than Llama's: Gemma, OLMo, GLM-4, Cohere.
@family(
    "gemma", max_position_embeddings=8192, head_dim=256, num_key_value_heads=16, tie_word_embeddings=True,
    eos_token_id=1, hidden_act="gelu_pytorch_tanh",
)  # fmt: skip
def gemma(fields: Fields, /, rope: RopeFacts | None = LLAMA_ROPE, **others: Any) -> ModelConfig:
    # Old files say "gelu" and mean its approximation by a tanh, unless hidden_activation says something else.
    if fields.has("hidden_activation"):
        fields = fields.with_names(hidden_act="hidden_activation")
    elif fields.get("hidden_act") == "gelu":
        fields = fields.with_value("hidden_act", "gelu_pytorch_tanh")
    config = llama_like(fields, attention_biases(fields), rope, rms_norm(fields, plus_one=True), **others)
    return replace(config, multipliers=Multipliers(embedding=config.hidden_size**0.5, rounded=True))


def _gemma2_like(fields: Fields, pattern: int, rope: RopeFacts | None, **others: Any) -> ModelConfig:
    fields = fields.with_defaults(num_key_value_heads=4, hidden_activation="gelu_pytorch_tanh")
    softcap = _softcap(fields, "final_logit_softcapping")
    config = gemma(fields, rope, post_norms=True, logits_softcap=softcap, **others)
    config = with_rules(config, scale=fields.factor("query_pre_attn_scalar", 256) ** -0.5)
    return with_window_pattern(fields, config, pattern)


def _softcap(fields: Fields, name: str) -> float | None:
    return fields.factor(name) if fields.has(name) else None


@family("gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
def gemma2(fields: Fields) -> ModelConfig:
    fields.note("sliding_window_size")  # repeats sliding_window
    return with_rules(_gemma2_like(fields, 2, LLAMA_ROPE), softcap=_softcap(fields, "attn_logit_softcapping"))


@family("gemma3_text", max_position_embeddings=131072, rope_theta=1e6)
def gemma3(fields: Fields) -> ModelConfig:
    fields.note("_sliding_window_pattern")  # transformers has made layer_types of it
    pattern = fields.whole("sliding_window_pattern", 1, MAX_POSITIONS, 6)
    config = _gemma2_like(fields, pattern, None, query_key_norm=True)
    return with_ropes(fields, config, fields.number("rope_local_base_freq", 1, MAX_THETA, 1e4))


@family("olmo2", eos_token_id=50279, rms_norm_eps=1e-5)
def olmo2(fields: Fields, rope: RopeFacts | None = LLAMA_ROPE) -> ModelConfig:
    norm = rms_norm(fields, rounded_last=True)
    return llama_like(fields, attention_biases(fields), rope, norm, post_norms=True, heads_normed_together=True)


@family("olmo3", rope_theta=500000.0)
def olmo3(fields: Fields) -> ModelConfig:
    return with_ropes(fields, with_window_pattern(fields, olmo2(fields, None), 4))


@family(
    "glm", max_position_embeddings=131072, num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-7,
    attention_bias=True, partial_rotary_factor=0.5,
)  # fmt: skip
def glm(fields: Fields, post_norms: bool = False) -> ModelConfig:
    biases = Biases(qkv=fields.flag("attention_bias"))
    return llama_like(fields, biases, RopeFacts(partial=True, interleaved=True), post_norms=post_norms)


@family("glm4")
def glm4(fields: Fields) -> ModelConfig:
    return glm(fields, post_norms=True)


@family("cohere", max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=255001, logit_scale=0.0625)
def cohere(fields: Fields) -> ModelConfig:
    biases, norm = attention_biases(fields), layer_norm(fields, "layer_norm_eps", bias=False)
    config = llama_like(fields, biases, RopeFacts(interleaved=True), norm, branches=Branches.parallel)
    return replace(config, multipliers=Multipliers(logits=fields.factor("logit_scale", 1.0)))


@family("cohere2")
def cohere2(fields: Fields) -> ModelConfig:
    """Layers without a window have no rotary positions."""
    fields.note("layer_switch")  # repeats sliding_window_pattern
    fields.only(
        order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj", rotary_pct=1,
        use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=True,
    )  # fmt: skip
    config = with_window_pattern(fields, cohere(fields), fields.whole("sliding_window_pattern", 1, MAX_POSITIONS, 4))
    rules = [replace(rule, rope=None if rule.window is None else rule.rope) for rule in config.rules]
    return replace(config, rules=tuple(rules))
