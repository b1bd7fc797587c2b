"""Mixtures of experts."""

from collections.abc import Mapping
from dataclasses import replace

from text_generation_server.models.architecture import Biases, ModelConfig, Moe
from text_generation_server.models.families.llama import MULTIPLIERS, granite
from text_generation_server.models.families.row import COMMON, Family, field_names
from text_generation_server.models.names import GRANITE_MOE_NAMES, MIXTRAL_NAMES, QWEN3_MOE_NAMES
from text_generation_server.models.reading import MAX_EXPERTS, MAX_WIDTH, llama_like
from text_generation_server.models.rope_config import MAX_POSITIONS
from text_generation_server.models.values import Fields
from text_generation_server.models.windows import with_one_window

EXPERTS = field_names("num_experts_per_tok num_local_experts")
QWEN_EXPERTS = field_names("""
    decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
    num_local_experts
""")


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
    return with_one_window(fields, replace(llama_like(fields, Biases()), names=MIXTRAL_NAMES, moe=moe))


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
    return with_one_window(fields if fields.flag("use_sliding_window") else fields.without("sliding_window"), config)


def granitemoe(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(num_local_experts=8, num_experts_per_tok=2)
    moe = _moe(fields, "num_local_experts", "intermediate_size", over_chosen=True)
    bias = fields.flag("attention_bias")
    config = granite(fields)
    return replace(config, names=GRANITE_MOE_NAMES, moe=moe, biases=Biases(qkv=bias, attention_output=bias))


FAMILIES: Mapping[str, Family] = {
    "granitemoe": Family(COMMON | {"attention_bias"} | MULTIPLIERS | EXPERTS, granitemoe),
    "mixtral": Family(COMMON | {"sliding_window"} | EXPERTS, mixtral),
    "qwen3_moe": Family(COMMON | {"attention_bias", "sliding_window", "use_sliding_window"} | QWEN_EXPERTS, qwen3_moe),
}
