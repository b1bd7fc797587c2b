"""Families whose norms stand in other places, or are of another kind, than Llama's: Gemma, GLM-4, Cohere."""

from collections.abc import Mapping
from dataclasses import replace

from text_generation_server.models.architecture import Biases, Branches, ModelConfig, Multipliers
from text_generation_server.models.families.row import COMMON, Family, field_names
from text_generation_server.models.names import GLM4_NAMES
from text_generation_server.models.reading import layer_norm, llama_like
from text_generation_server.models.rope_config import MAX_POSITIONS, RopeFacts
from text_generation_server.models.values import Fields
from text_generation_server.models.windows import layer_windows, read_window, with_windows

COHERE = field_names("attention_bias layer_norm_eps logit_scale")


def gemma(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(
        max_position_embeddings=8192, head_dim=256, num_key_value_heads=16, tie_word_embeddings=True, eos_token_id=1,
        hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    # Old files say "gelu" and mean its approximation by a tanh, unless hidden_activation says something else.
    if fields.raw["hidden_act"] == "gelu" or fields.has("hidden_activation"):
        fields = fields.with_value("hidden_act", fields.word("hidden_activation", "gelu_pytorch_tanh"))
    bias = fields.flag("attention_bias")
    config = llama_like(fields, Biases(qkv=bias, attention_output=bias))
    multipliers = Multipliers(embedding=config.hidden_size**0.5, rounded=True)
    return replace(config, norm=replace(config.norm, plus_one=True), multipliers=multipliers)


def glm4(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(
        max_position_embeddings=131072, num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-7,
        attention_bias=True, partial_rotary_factor=0.5,
    )  # fmt: skip
    biases = Biases(qkv=fields.flag("attention_bias"))
    config = llama_like(fields, biases, RopeFacts(partial=True, interleaved=True))
    return replace(config, names=GLM4_NAMES, post_norms=True)


def cohere(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(
        max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=255001, logit_scale=0.0625
    )
    bias = fields.flag("attention_bias")
    norm = replace(layer_norm(fields, "layer_norm_eps"), bias=False)
    config = llama_like(fields, Biases(qkv=bias, attention_output=bias), RopeFacts(interleaved=True), norm)
    multipliers = Multipliers(logits=fields.number("logit_scale", 1e-6, 1e6, 1.0))
    return replace(config, branches=Branches.parallel, multipliers=multipliers)


def cohere2(fields: Fields) -> ModelConfig:
    """Layers without a window have no rotary positions."""
    config, fields = cohere(fields), fields.with_defaults(sliding_window=4096, sliding_window_pattern=4)
    count, pattern = config.num_layers, fields.whole("sliding_window_pattern", 1, MAX_POSITIONS, 4)
    config = with_windows(config, layer_windows(fields, count, read_window(fields), lambda i: (i + 1) % pattern != 0))
    rules = [replace(rule, rope=None if rule.window is None else rule.rope) for rule in config.rules]
    return replace(config, rules=tuple(rules))


FAMILIES: Mapping[str, Family] = {
    "cohere": Family(COMMON | COHERE, cohere),
    "cohere2": Family(COMMON | COHERE | field_names("layer_types sliding_window sliding_window_pattern"), cohere2),
    "gemma": Family(COMMON | field_names("attention_bias hidden_activation"), gemma),
    "glm4": Family(COMMON | field_names("attention_bias partial_rotary_factor"), glm4),
}
