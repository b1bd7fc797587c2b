"""What a model is whose weights are in a GGUF file: the names of its tensors there, and the order of their rows."""

from dataclasses import replace
from pathlib import Path

from text_generation_common.gguf.config import architecture_of
from text_generation_common.gguf.container import GgufHeader, is_gguf, read_header
from text_generation_common.models.architecture import AttentionRule, Converted, ModelConfig
from text_generation_common.models.names import ExpertLayout, LayerNames, QkvLayout, TensorNames

LAYER = LayerNames(
    queries="attn_q", keys="attn_k", values="attn_v", attention_output="attn_output", gate="ffn_gate", up="ffn_up",
    down="ffn_down", attention_norm="attn_norm", mlp_norm="ffn_norm", attention_post_norm="post_attention_norm",
    mlp_post_norm="post_ffw_norm", router="ffn_gate_inp", expert_gate="ffn_gate_exps", expert_up="ffn_up_exps",
    expert_down="ffn_down_exps", query_norm="attn_q_norm", key_norm="attn_k_norm", shared_gate="ffn_gate_shexp",
    shared_up="ffn_up_shexp", shared_down="ffn_down_shexp", shared_score="ffn_gate_inp_shexp",
    sinks="attn_sinks.weight",
)  # fmt: skip
NAMES = TensorNames(
    "token_embd", "output_norm", "output", "blk", LAYER, positions="position_embd", embedding_norm="token_embd_norm",
    experts=ExpertLayout.merged,
)  # fmt: skip
# Names in layers that differ, by the family.
NO_NORMS_BEFORE = {"attention_norm": "", "mlp_norm": ""}
OTHERS = {"gpt_oss": {"mlp_norm": "post_attention_norm"}, "olmo2": NO_NORMS_BEFORE, "olmo3": NO_NORMS_BEFORE}
FALCON_40B = {"attention_norm": "attn_norm_2", "mlp_norm": "attn_norm"}
QKV = ("queries", "keys", "values")
SHARED = ("shared_gate", "shared_up", "shared_down", "shared_score")
LINEARS = (*QKV, "attention_output", "gate", "up", "down", *SHARED)


def in_gguf(path: Path, config: ModelConfig) -> ModelConfig:
    """The config with what is different in the model's GGUF file; the same if its weights are in others."""
    if not is_gguf(path):
        return config
    header = read_header(path)
    pairs = architecture_of(header).pairs
    rules = tuple(map(_in_pairs, config.rules)) if pairs else config.rules
    return replace(config, names=_names(header, config), rules=rules, converted=Converted(config.names, pairs))


def names_before(config: ModelConfig) -> dict[str, str]:
    """The names of linear layers, of the embedding and of the head in the files that the model's were made of, with
    those in the model's own. Without layers that are one tensor in the one and several in the other."""
    assert config.converted is not None
    before, names = config.converted.names, config.names
    found = {before.embedding: names.embedding, before.head: names.head}
    for number in range(config.num_layers):
        old, new = before.layer(number), names.layer(number)
        pairs = {(getattr(old, role), getattr(new, role)) for role in LINEARS if getattr(old, role)}
        for one, other in pairs:
            if all((one == a) == (other == b) for a, b in pairs):
                found[one] = other
    return found


def rows_before(config: ModelConfig) -> dict[str, list[int]]:
    """For each layer of the files whose rows have another order than in those that the model's files were made of: the
    number that each of its rows had there."""
    if config.converted is None:
        return {}
    size, heads, kv_heads = config.head_size, config.num_heads, config.num_kv_heads
    orders: dict[str, list[int]] = {}
    if config.converted.pairs:
        orders = {"queries": _neighbours(heads, size), "keys": _neighbours(kv_heads, size)}
    elif config.converted.names.qkv is QkvLayout.groups and config.names.qkv is not QkvLayout.groups:
        orders = {"queries": _ungrouped(heads // kv_heads, kv_heads, size)}
    layers = map(config.names.layer, range(config.num_layers))
    return {getattr(names, role): order for names in layers for role, order in orders.items()}


def _neighbours(heads: int, size: int) -> list[int]:
    """Row 2i of each head was row i, row 2i + 1 was row i + size / 2."""
    return [head * size + row % 2 * (size // 2) + row // 2 for head in range(heads) for row in range(size)]


def _ungrouped(queries: int, groups: int, size: int) -> list[int]:
    """All queries, all keys, all values were, for each key, its queries, the key and the value."""
    parts = (range(queries), (queries,), (queries + 1,))
    heads = [group * (queries + 2) + head for part in parts for group in range(groups) for head in part]
    return [head * size + row for head in heads for row in range(size)]


def _in_pairs(rule: AttentionRule) -> AttentionRule:
    return rule if rule.rope is None else replace(rule, rope=replace(rule.rope, interleaved=True))


def _names(header: GgufHeader, config: ModelConfig) -> TensorNames:
    has = header.tensors.__contains__
    names = NAMES.but(**OTHERS.get(config.model_type, {}))
    if has("blk.0.attn_norm_2.weight"):
        names = names.but(**FALCON_40B)
    if has("blk.0.attn_qkv.weight"):
        names = names.but(**dict.fromkeys(QKV, "attn_qkv"))
    if not any(name.endswith(".ffn_gate.weight") for name in header.tensors):  # gate and up are one tensor
        names = names.but(gate="ffn_up")
    if any(name.endswith(".ffn_gate_up_exps.weight") for name in header.tensors):
        names = replace(names.but(expert_gate="", expert_up="ffn_gate_up_exps"), experts=ExpertLayout.stacked)
    if has("blk.0.ffn_gate.0.weight"):  # files from 2023
        names = names.but(expert_gate="ffn_gate.{}", expert_up="ffn_up.{}", expert_down="ffn_down.{}")
        names = replace(names, experts=ExpertLayout.apart)
    return names
