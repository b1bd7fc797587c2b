"""Families whose norms stand in other places, or are of another kind, than Llama's: Gemma, OLMo, GLM-4, Cohere."""

from dataclasses import replace
from typing import Any

from text_generation_common.models.architecture import Biases, Branches, ModelConfig, Multipliers
from text_generation_common.models.reading import (
    attention_biases,
    family,
    layer_norm,
    llama_like,
    rms_norm,
    with_ropes,
    with_rules,
    with_window_pattern,
)
from text_generation_common.models.rope_config import LLAMA_ROPE, MAX_POSITIONS, MAX_THETA, RopeFacts
from text_generation_common.models.values import Fields


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
