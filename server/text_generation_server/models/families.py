"""The families of models that are served, a row for each: what their config.json says, and what their tensors are
called. `decoder.py` computes them all, and never sees a family's name.

A reader turns the fields of config.json into a `ModelConfig`. Defaults are those of transformers, which files rely on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from text_generation_server.models.alibi_families import (
    BLOOM_SPELLING,
    MPT_SPELLING,
    OLD_SPELLING,
    bloom,
    falcon,
    mpt,
)
from text_generation_server.models.architecture import (
    AttentionRule,
    Biases,
    Branches,
    ModelConfig,
    Moe,
    Multipliers,
    Norm,
)
from text_generation_server.models.names import (
    BIGCODE_NAMES,
    GLM4_NAMES,
    GPT2_NAMES,
    GPTJ_NAMES,
    GRANITE_MOE_NAMES,
    MIXTRAL_NAMES,
    NEOX_NAMES,
    OPT_NAMES,
    PHI3_NAMES,
    PHI_NAMES,
    QWEN3_MOE_NAMES,
    QWEN3_NAMES,
    STARCODER2_NAMES,
    QkvLayout,
)
from text_generation_server.models.reading import (
    MAX_EXPERTS,
    MAX_WIDTH,
    layer_norm,
    layer_windows,
    llama_like,
    with_windows,
)
from text_generation_server.models.rope_config import LLAMA_ROPE, MAX_POSITIONS, RopeFacts
from text_generation_server.models.values import Fields


@dataclass(frozen=True, slots=True)
class Family:
    fields: frozenset[str]  # the fields of config.json that `read` reads
    read: Callable[[Fields], ModelConfig]


def _fields(names: str) -> frozenset[str]:
    return frozenset(names.split())


COMMON = _fields("""
    compression_config dtype eos_token_id head_dim hidden_act hidden_size intermediate_size max_position_embeddings
    model_type num_attention_heads num_hidden_layers num_key_value_heads quantization_config rms_norm_eps
    rope_parameters rope_scaling rope_theta tie_word_embeddings torch_dtype vocab_size
""")
BIASES = _fields("attention_bias mlp_bias")
WINDOWS = _fields("layer_types max_window_layers sliding_window use_sliding_window")


def mistral(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)
    return _with_one_window(fields, llama_like(fields, Biases()))


def qwen2(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(max_position_embeddings=32768, num_key_value_heads=32)
    return _with_windows_from(fields, llama_like(fields, Biases(qkv=True)))


def qwen3(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(max_position_embeddings=32768, num_key_value_heads=32, head_dim=128)
    bias = fields.flag("attention_bias")
    config = llama_like(fields, Biases(qkv=bias, attention_output=bias))
    return _with_windows_from(fields, replace(config, names=QWEN3_NAMES, query_key_norm=True))


def phi3(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(
        max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5, eos_token_id=32000
    )
    aliases = (("su", "longrope"), ("yarn", "longrope"))
    config = llama_like(fields, Biases(), RopeFacts(partial=True, aliases=aliases))
    return _with_one_window(fields, replace(config, names=PHI3_NAMES))


def smollm3(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(
        max_position_embeddings=32768, num_key_value_heads=4, tie_word_embeddings=True, eos_token_id=128001,
        rope_theta=2000000.0,
    )  # fmt: skip
    config = llama_like(fields)
    count, interval = config.num_layers, fields.whole("no_rope_layer_interval", 1, MAX_POSITIONS, 4)
    turns = fields.bits("no_rope_layers", count, [int((i + 1) % interval != 0) for i in range(count)])
    rules = [replace(rule, rope=rule.rope if turn else None) for rule, turn in zip(config.rules, turns, strict=True)]
    window = _window(fields) if fields.flag("use_sliding_window") else None
    windows = layer_windows(fields, count, window, lambda i: not turns[i])
    return with_windows(replace(config, rules=tuple(rules)), windows)


def granite(fields: Fields) -> ModelConfig:
    config = llama_like(fields)
    attention, embedding, residual, logits = (
        fields.number(name, 1e-6, 1e6, 1.0)
        for name in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    )
    rules = tuple(replace(rule, scale=attention) for rule in config.rules)
    return replace(config, rules=rules, multipliers=Multipliers(embedding, residual=residual, logits=1 / logits))


GPT2_SPELLING = {
    "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "max_position_embeddings": "n_positions", "hidden_act": "activation_function",
}  # fmt: skip
EVERY_BIAS = Biases(qkv=True, attention_output=True, mlp=True)


def _gpt2_like(fields: Fields, biases: Biases, rope: RopeFacts | None, activation: str = "gelu_new") -> ModelConfig:
    fields = fields.with_names(**GPT2_SPELLING).without("head_dim", "num_key_value_heads")
    fields = fields.with_defaults(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, max_position_embeddings=1024, vocab_size=50257,
        hidden_act=activation, tie_word_embeddings=True, eos_token_id=50256,
    )  # fmt: skip
    if not fields.has("intermediate_size"):
        fields = Fields(
            {**fields.raw, "intermediate_size": 4 * fields.whole("hidden_size", 1, MAX_WIDTH)}, fields.where
        )
    return replace(llama_like(fields, biases, rope, layer_norm(fields, "layer_norm_epsilon")), gated=False)


def gpt2(fields: Fields) -> ModelConfig:
    config = replace(_gpt2_like(fields, EVERY_BIAS, None), names=GPT2_NAMES, learned_positions=True)
    scale = config.rules[0].scale if fields.with_defaults(scale_attn_weights=True).flag("scale_attn_weights") else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx")
    rules = [AttentionRule(scale / (i + 1) if by_layer else scale, None) for i in range(config.num_layers)]
    return replace(config, rules=tuple(rules))


def gpt_bigcode(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(multi_query=True, scale_attn_weights=True)
    config = _gpt2_like(fields, EVERY_BIAS, None, "gelu_pytorch_tanh")
    scale = config.rules[0].scale if fields.flag("scale_attn_weights") else 1.0
    rules = (AttentionRule(scale, None),) * config.num_layers
    config = replace(config, rules=rules, names=BIGCODE_NAMES, learned_positions=True)
    if fields.flag("multi_query"):
        return replace(config, num_kv_heads=1)
    return replace(config, names=replace(BIGCODE_NAMES, qkv=QkvLayout.groups))


def gptj(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(
        n_embd=4096, n_layer=28, n_head=16, n_positions=2048, vocab_size=50400, tie_word_embeddings=False, rotary_dim=64
    )
    biases = Biases(mlp=True, head=True)
    config = replace(_gpt2_like(fields, biases, LLAMA_ROPE), names=GPTJ_NAMES, branches=Branches.parallel)
    size = fields.whole("rotary_dim", 2, config.head_size) if fields.has("rotary_dim") else config.head_size
    if size % 2:
        raise fields.error("rotary_dim", "an even number")
    (rope,) = config.ropes
    rule = replace(config.rules[0], rope=replace(rope, size=size, interleaved=True))
    return replace(config, rules=(rule,) * config.num_layers)


def gpt_neox(fields: Fields) -> ModelConfig:
    fields = fields.with_names(partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base")
    fields = fields.without("head_dim", "num_key_value_heads")
    fields = fields.with_defaults(
        hidden_act="gelu", attention_bias=True, use_parallel_residual=True, partial_rotary_factor=0.25, eos_token_id=2
    )
    attention, parallel = fields.flag("attention_bias"), fields.flag("use_parallel_residual")
    biases = Biases(qkv=attention, attention_output=attention, mlp=True)
    config = llama_like(fields, biases, RopeFacts(partial=True), layer_norm(fields, "layer_norm_eps"))
    branches = Branches.parallel_two_norms if parallel else Branches.sequential
    return replace(config, names=NEOX_NAMES, gated=False, branches=branches)


def phi(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(hidden_act="gelu_new", partial_rotary_factor=0.5, eos_token_id=2)
    biases = replace(EVERY_BIAS, head=True)
    config = llama_like(fields, biases, RopeFacts(partial=True), layer_norm(fields, "layer_norm_eps"))
    return replace(config, names=PHI_NAMES, gated=False, branches=Branches.parallel)


def starcoder2(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(
        hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096, num_key_value_heads=2, use_bias=True,
        tie_word_embeddings=True, eos_token_id=50256,
    )  # fmt: skip
    biases = EVERY_BIAS if fields.flag("use_bias") else Biases()
    config = llama_like(fields, biases, norm=layer_norm(fields, "norm_epsilon"))
    return _with_one_window(fields, replace(config, names=STARCODER2_NAMES, gated=False))


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
    config = with_windows(config, layer_windows(fields, count, _window(fields), lambda i: (i + 1) % pattern != 0))
    rules = [replace(rule, rope=None if rule.window is None else rule.rope) for rule in config.rules]
    return replace(config, rules=tuple(rules))


def _moe(fields: Fields, experts: str, size: str, over_chosen: bool) -> Moe:
    """`experts` and `size` are the names of fields: the number of experts, and each expert's intermediate size."""
    count = fields.whole(experts, 1, MAX_EXPERTS)
    chosen = fields.whole("num_experts_per_tok", 1, count)
    if fields.word("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("hidden_act", '"silu": experts with other activations are not supported yet')
    return Moe(count, chosen, fields.whole(size, 1, MAX_WIDTH), over_chosen)


def mixtral(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(
        max_position_embeddings=131072, num_key_value_heads=8, rms_norm_eps=1e-5, num_local_experts=8,
        num_experts_per_tok=2,
    )  # fmt: skip
    moe = _moe(fields, "num_local_experts", "intermediate_size", over_chosen=True)
    return _with_one_window(fields, replace(llama_like(fields, Biases()), names=MIXTRAL_NAMES, moe=moe))


def qwen3_moe(fields: Fields) -> ModelConfig:
    fields = fields.with_names(num_experts="num_local_experts").with_defaults(
        max_position_embeddings=32768, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, decoder_sparse_step=1,
    )  # fmt: skip
    bias = fields.flag("attention_bias")
    config = llama_like(fields, Biases(qkv=bias, attention_output=bias))
    step, count = fields.whole("decoder_sparse_step", 1, MAX_POSITIONS), config.num_layers
    only_dense = fields.wholes("mlp_only_layers", 0, count - 1)
    dense = frozenset(i for i in range(count) if i in only_dense or (i + 1) % step)
    moe = _moe(fields, "num_experts", "moe_intermediate_size", fields.flag("norm_topk_prob"))
    moe = replace(moe, dense_layers=dense)
    config = replace(config, names=QWEN3_MOE_NAMES, query_key_norm=True, moe=moe)
    return _with_one_window(fields if fields.flag("use_sliding_window") else fields.without("sliding_window"), config)


def granitemoe(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(num_local_experts=8, num_experts_per_tok=2)
    moe = _moe(fields, "num_local_experts", "intermediate_size", over_chosen=True)
    bias = fields.flag("attention_bias")
    config = granite(fields)
    return replace(config, names=GRANITE_MOE_NAMES, moe=moe, biases=Biases(qkv=bias, attention_output=bias))


def opt(fields: Fields) -> ModelConfig:
    fields = fields.without("intermediate_size", "num_key_value_heads", "head_dim")
    fields = fields.with_names(intermediate_size="ffn_dim", hidden_act="activation_function").with_defaults(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, vocab_size=50272,
        hidden_act="relu", tie_word_embeddings=True, eos_token_id=2, do_layer_norm_before=True, enable_bias=True,
        layer_norm_elementwise_affine=True,
    )  # fmt: skip
    for name in ("do_layer_norm_before", "layer_norm_elementwise_affine"):  # OPT-350m has norms after its layers
        if not fields.flag(name):
            raise fields.error(name, "true: other kinds of OPT are not supported")
    biases = EVERY_BIAS if fields.flag("enable_bias") else Biases()
    config = llama_like(fields, biases, None, Norm(1e-5, centred=True, bias=True))
    if fields.whole("word_embed_proj_dim", 1, MAX_WIDTH, config.hidden_size) != config.hidden_size:
        raise fields.error("word_embed_proj_dim", f"hidden_size ({config.hidden_size})")
    return replace(config, names=OPT_NAMES, gated=False, learned_positions=True, position_offset=2)


def _with_one_window(fields: Fields, config: ModelConfig) -> ModelConfig:
    return with_windows(config, [_window(fields)] * config.num_layers)


def _with_windows_from(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The layers from max_window_layers on have a window, if use_sliding_window is true."""
    fields = fields.with_defaults(sliding_window=4096, max_window_layers=28)
    first = fields.whole("max_window_layers", 0, MAX_POSITIONS, 28)
    window = _window(fields) if fields.flag("use_sliding_window") else None
    return with_windows(config, layer_windows(fields, config.num_layers, window, lambda i: i >= first))


def _window(fields: Fields) -> int | None:
    return fields.whole("sliding_window", 1, MAX_POSITIONS) if fields.has("sliding_window") else None


NEOX = _fields("""
    attention_bias layer_norm_eps partial_rotary_factor rotary_emb_base rotary_pct use_parallel_residual
""")
NO_ROPE = _fields("no_rope_layer_interval no_rope_layers")
MULTIPLIERS = _fields("attention_multiplier embedding_multiplier logits_scaling residual_multiplier")
# The last field makes transformers compute the softmax in float32, as is done here always.
BIGCODE = _fields("multi_query scale_attn_weights scale_attention_softmax_in_fp32")
GPT2 = COMMON | _fields("layer_norm_epsilon") | set(GPT2_SPELLING.values())
EXPERTS = _fields("num_experts_per_tok num_local_experts")
QWEN_EXPERTS = _fields("""
    decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
    num_local_experts
""")
COHERE = _fields("attention_bias layer_norm_eps logit_scale")
# What Megatron fused, and how it summed in training: transformers computes the same whatever their values are.
MEGATRON = _fields("""
    bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add skip_bias_add_qkv slow_but_exact
""")
BLOOM = MEGATRON | set(BLOOM_SPELLING.values()) | {"apply_residual_connection_post_layernorm", "layer_norm_epsilon"}
FALCON = _fields("""
    activation alibi bias ffn_hidden_size layer_norm_epsilon multi_query new_decoder_architecture num_kv_heads
    num_ln_in_parallel_attn parallel_attn
""")
MPT = _fields("""
    attn_config emb_pdrop embedding_fraction expansion_ratio init_device layer_norm_epsilon learned_pos_emb no_bias
    norm_type
""")
OPT = _fields("""
    activation_function do_layer_norm_before enable_bias ffn_dim layer_norm_elementwise_affine layerdrop
    word_embed_proj_dim
""")
FAMILIES: Mapping[str, Family] = {  # families by the model_type of config.json
    "bloom": Family(COMMON | BLOOM, bloom),
    "cohere": Family(COMMON | COHERE, cohere),
    "cohere2": Family(COMMON | COHERE | _fields("layer_types sliding_window sliding_window_pattern"), cohere2),
    "falcon": Family(COMMON | FALCON | set(OLD_SPELLING.values()), falcon),
    "gemma": Family(COMMON | _fields("attention_bias hidden_activation"), gemma),
    "glm4": Family(COMMON | _fields("attention_bias partial_rotary_factor"), glm4),
    "gpt2": Family(GPT2 | _fields("scale_attn_by_inverse_layer_idx scale_attn_weights"), gpt2),
    "gpt_bigcode": Family(GPT2 | BIGCODE, gpt_bigcode),
    "gpt_neox": Family(COMMON | NEOX, gpt_neox),
    "gptj": Family(GPT2 | _fields("rotary rotary_dim scale_attn_weights"), gptj),
    "granite": Family(COMMON | BIASES | MULTIPLIERS, granite),
    "granitemoe": Family(COMMON | {"attention_bias"} | MULTIPLIERS | EXPERTS, granitemoe),
    "llama": Family(COMMON | BIASES, llama_like),
    "mistral": Family(COMMON | {"sliding_window"}, mistral),
    "mixtral": Family(COMMON | {"sliding_window"} | EXPERTS, mixtral),
    "mpt": Family(COMMON | MPT | set(MPT_SPELLING.values()), mpt),
    "opt": Family(COMMON | OPT, opt),
    "phi": Family(COMMON | {"layer_norm_eps", "partial_rotary_factor"}, phi),
    "phi3": Family(COMMON | {"sliding_window", "original_max_position_embeddings", "partial_rotary_factor"}, phi3),
    "qwen2": Family(COMMON | WINDOWS, qwen2),
    "qwen3": Family(COMMON | WINDOWS | {"attention_bias"}, qwen3),
    "qwen3_moe": Family(COMMON | {"attention_bias", "sliding_window", "use_sliding_window"} | QWEN_EXPERTS, qwen3_moe),
    "starcoder2": Family(COMMON | {"norm_epsilon", "sliding_window", "use_bias"}, starcoder2),
    "smollm3": Family(COMMON | BIASES | WINDOWS | NO_ROPE, smollm3),
}
