"""GPT-2 and what came after it: LayerNorms, an MLP without a gate, often biases. GPT-2, GPTBigCode and OPT have an
embedding of positions. BLOOM, MPT and some Falcons know positions by slopes of scores: ALiBi, arXiv 2108.12409."""

from dataclasses import replace

from text_generation_common.models.architecture import Biases, Branches, ModelConfig, Norm
from text_generation_common.models.names import QkvLayout
from text_generation_common.models.reading import (
    EVERY_BIAS,
    MAX_WIDTH,
    attention_biases,
    family,
    gpt_like,
    layer_norm,
    llama_like,
    with_one_window,
    with_rules,
)
from text_generation_common.models.rope_config import LLAMA_ROPE, RopeFacts
from text_generation_common.models.values import Fields

OWN_KEYS = ("head_dim", "num_key_value_heads")  # fields that families do not have whose query heads have their own keys
GPT2_SPELLING = {
    "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "max_position_embeddings": "n_positions", "hidden_act": "activation_function",
}  # fmt: skip
# What Megatron fused, and how it summed in training: transformers computes the same whatever their values are.
MEGATRON = (
    "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv",
    "slow_but_exact",
)  # fmt: skip
# In files of StarCoder2 beside the fields that transformers reads.
OF_TRAINING_CODE = (
    "activation_function", "layer_norm_epsilon", "scale_attention_softmax_in_fp32", "scale_attn_weights",
)  # fmt: skip
MPT_TRAINING = ("emb_pdrop", "embedding_fraction", "init_device", "learned_pos_emb")


def _gpt2_like(fields: Fields) -> ModelConfig:
    fields = fields.with_names(**GPT2_SPELLING).with_defaults(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, max_position_embeddings=1024, vocab_size=50257,
        hidden_act="gelu_new", tie_word_embeddings=True, eos_token_id=50256, scale_attn_weights=True,
    )  # fmt: skip
    config = gpt_like(fields.without(*OWN_KEYS), EVERY_BIAS, learned_positions=True)
    return config if fields.flag("scale_attn_weights") else with_rules(config, scale=1.0)


@family("gpt2")
def gpt2(fields: Fields) -> ModelConfig:
    fields.only(attention_head_type="multihead")  # SantaCoder's own code has another one
    config = _gpt2_like(fields)
    if not fields.flag("scale_attn_by_inverse_layer_idx"):
        return config
    rules = [replace(rule, scale=rule.scale / (i + 1)) for i, rule in enumerate(config.rules)]
    return replace(config, rules=tuple(rules))


@family("gpt_bigcode", multi_query=True, hidden_act="gelu_pytorch_tanh")
def gpt_bigcode(fields: Fields) -> ModelConfig:
    fields.note("scale_attention_softmax_in_fp32")  # as it is done here always
    config = _gpt2_like(fields)
    if fields.flag("multi_query"):
        return replace(config, num_kv_heads=1)
    return replace(config, names=replace(config.names, qkv=QkvLayout.groups))


@family(
    "gptj", hidden_size=4096, num_hidden_layers=28, num_attention_heads=16, max_position_embeddings=2048,
    vocab_size=50400, rotary_dim=64, hidden_act="gelu_new", eos_token_id=50256,
)  # fmt: skip
def gptj(fields: Fields) -> ModelConfig:
    fields = fields.with_names(**GPT2_SPELLING).without(*OWN_KEYS, "rotary", "scale_attn_weights")
    config = gpt_like(fields, Biases(mlp=True, head=True), LLAMA_ROPE, branches=Branches.parallel)
    size = fields.whole("rotary_dim", 2, config.head_size, config.head_size)
    if size % 2:
        raise fields.error("rotary_dim", "an even number")
    return with_rules(config, rope=replace(config.ropes[0], size=size, interleaved=True))


@family(
    "gpt_neox", hidden_act="gelu", attention_bias=True, use_parallel_residual=True, partial_rotary_factor=0.25,
    eos_token_id=2,
)  # fmt: skip
def gpt_neox(fields: Fields) -> ModelConfig:
    fields = fields.without(*OWN_KEYS).with_names(partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base")
    branches = Branches.parallel_two_norms if fields.flag("use_parallel_residual") else Branches.sequential
    biases, norm = attention_biases(fields, mlp=True), layer_norm(fields, "layer_norm_eps")
    return llama_like(fields, biases, RopeFacts(partial=True), norm, gated=False, branches=branches)


@family("phi", hidden_act="gelu_new", partial_rotary_factor=0.5, eos_token_id=2)
def phi(fields: Fields) -> ModelConfig:
    biases, norm = replace(EVERY_BIAS, head=True), layer_norm(fields, "layer_norm_eps")
    return llama_like(fields, biases, RopeFacts(partial=True), norm, gated=False, branches=Branches.parallel)


@family(
    "starcoder2", hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096, num_key_value_heads=2, use_bias=True,
    tie_word_embeddings=True, eos_token_id=50256,
)  # fmt: skip
def starcoder2(fields: Fields) -> ModelConfig:
    fields.only(mlp_type="default", norm_type="layer_norm")
    fields.note(*OF_TRAINING_CODE)
    biases = EVERY_BIAS if fields.flag("use_bias") else Biases()
    return with_one_window(fields, llama_like(fields, biases, norm=layer_norm(fields, "norm_epsilon"), gated=False))


@family(
    "opt", hidden_size=768, num_hidden_layers=12, num_attention_heads=12, ffn_dim=3072, vocab_size=50272,
    hidden_act="relu", tie_word_embeddings=True, eos_token_id=2, enable_bias=True,
)  # fmt: skip
def opt(fields: Fields) -> ModelConfig:
    fields.only(do_layer_norm_before=True, layer_norm_elementwise_affine=True)  # OPT-350m has norms after its layers
    fields = fields.without(*OWN_KEYS, "intermediate_size", "layerdrop")
    fields = fields.with_names(intermediate_size="ffn_dim", hidden_act="activation_function")
    biases, norm = EVERY_BIAS if fields.flag("enable_bias") else Biases(), Norm(1e-5, centred=True, bias=True)
    config = llama_like(fields, biases, None, norm, gated=False, learned_positions=True, position_offset=2)
    if fields.whole("word_embed_proj_dim", 1, MAX_WIDTH, config.hidden_size) != config.hidden_size:
        raise fields.lacks("word_embed_proj_dim", f"hidden_size ({config.hidden_size})")
    return config


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """n = the largest power of two that is not above the number of heads: 2^(-8i / n) for i = 1 … n, then the odd
    powers of 2^(-4 / n)."""
    n = 1 << (heads.bit_length() - 1)
    powers = [*(8 * i / n for i in range(1, n + 1)), *(4 * i / n for i in range(1, 2 * (heads - n), 2))]
    return tuple(2.0**-power for power in powers)


def mpt_slopes(heads: int) -> tuple[float, ...]:
    """n = the smallest power of two that is not below the number of heads: 2^(-8i / n) for i = 1 … n. Fewer heads than
    n have the slopes of even i first, then those of odd i."""
    n = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
    return tuple(slopes if n == heads else (slopes[1::2] + slopes[::2])[:heads])


@family(
    "bloom", vocab_size=250880, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, tie_word_embeddings=True,
    eos_token_id=2,
)  # fmt: skip
def bloom(fields: Fields) -> ModelConfig:
    fields.only(apply_residual_connection_post_layernorm=False)
    fields = fields.without(*OWN_KEYS, *MEGATRON, "intermediate_size", "max_position_embeddings")
    fields = fields.with_value("hidden_act", "gelu_pytorch_tanh").with_names(
        hidden_size="n_embed", num_hidden_layers="n_layer", num_attention_heads="n_head",
        max_position_embeddings="seq_length",
    )  # fmt: skip
    config = gpt_like(fields, EVERY_BIAS, embedding_norm=True)
    return with_rules(config, slopes=alibi_slopes(config.num_heads))


@family(
    "falcon", vocab_size=65024, hidden_size=4544, num_hidden_layers=32, num_attention_heads=71, hidden_act="gelu",
    multi_query=True, parallel_attn=True, tie_word_embeddings=True, eos_token_id=11,
)  # fmt: skip
def falcon(fields: Fields) -> ModelConfig:
    """Layouts: 7B (one norm, one key head), 40B (new_decoder_architecture: two norms), 11B (the same with one norm) and
    RW (attention, then MLP; ALiBi)."""
    fields.note("multi_query", "num_kv_heads")
    fields = fields.without(*OWN_KEYS, "intermediate_size")
    fields = fields.with_names(intermediate_size="ffn_hidden_size", hidden_act="activation", hidden_size="n_embed")
    is_new, is_parallel = fields.flag("new_decoder_architecture"), fields.flag("parallel_attn")
    norms = fields.whole("num_ln_in_parallel_attn", 1, 2, 2 if is_new else 1)
    if is_parallel and norms == 2 and not is_new:
        raise fields.error("num_ln_in_parallel_attn", "1 where new_decoder_architecture is false")
    if is_new:
        fields.only(parallel_attn=True)
        fields = fields.with_names(num_key_value_heads="num_kv_heads")
    elif fields.flag("multi_query"):
        fields = fields.with_value("num_key_value_heads", 1)
    biases = EVERY_BIAS if fields.flag("bias") else Biases()
    config = gpt_like(fields, biases, LLAMA_ROPE, branches=Branches.parallel if is_parallel else Branches.sequential)
    if is_new and norms == 2:
        names = config.names.but(attention_norm="ln_attn", mlp_norm="ln_mlp")
        config = replace(config, names=names, branches=Branches.parallel_two_norms)
    if not fields.flag("alibi"):
        return config
    scale = config.rules[0].scale  # multiplies the slopes, too
    return with_rules(config, rope=None, slopes=tuple(scale * slope for slope in alibi_slopes(config.num_heads)))


@family(
    "mpt", vocab_size=50368, hidden_size=2048, num_hidden_layers=24, num_attention_heads=16, tie_word_embeddings=True
)
def mpt(fields: Fields) -> ModelConfig:
    fields.only(expansion_ratio=4, no_bias=True, norm_type="low_precision_layernorm")
    attention = fields.inner("attn_config")
    attention.note("attn_impl", "tie_word_embeddings")
    attention.only(
        alibi=True, alibi_bias_max=8, attn_type="multihead_attention", clip_qkv=0, prefix_lm=False, qk_ln=False
    )
    fields = fields.without(*OWN_KEYS, *MPT_TRAINING, "intermediate_size", "max_position_embeddings")
    fields = fields.with_value("hidden_act", "gelu").with_names(
        hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    )  # fmt: skip
    config = gpt_like(fields, Biases(), norm_bias=False)
    scale = attention.factor("softmax_scale", config.rules[0].scale)
    return with_rules(config, scale=scale, slopes=mpt_slopes(config.num_heads))
