"""Sorts the fields of config.json: fields that we read, fields without effect on the computation, and all others.

One of the other fields may change what the model computes. It is refused if transformers knows it, for this family
(`family_fields.txt`) or for any type (`transformers_fields.txt`), unless its value is neutral: the model computes the
same without it, or it repeats what another field says. A field that transformers never reads is only logged as a
warning.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from text_generation_common.errors import ModelError, UnsupportedOption
from text_generation_common.models.rope_config import Rope
from text_generation_common.models.values import Fields, described, is_number, shown_name


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


OF_TRAINING = _names("""
    attn_pdrop embd_pdrop gradient_checkpointing init_std initializer_range output_router_logits pretraining_tp
    resid_pdrop router_aux_loss_coef router_jitter_noise unsloth_fixed unsloth_version
""")
OF_OTHER_TASKS = _names("""
    finetuning_task id2label label2id num_labels problem_type summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params
""")
# Which steps of attention transformers computes in float32. Here all of them are.
OF_PRECISION = _names("attention_softmax_in_fp32 reorder_and_upcast_attn")
OF_TRANSFORMERS = _names("""
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _flash_attn_2_enabled _name_or_path architectures attn_implementation cache_implementation chunk_size_feed_forward
    is_decoder is_llama_config keys_to_ignore_at_inference name_or_path output_attentions output_hidden_states
    return_dict tokenizer_class torchscript transformers.js_config transformers_version use_bfloat16 use_cache
    use_return_dict
""")
TOKEN_IDS = _names("""
    bos_token_id cls_token_id decoder_start_token_id mask_token_id pad_token_id sep_token_id unk_token_id
""")
# Sampling parameters, which old checkpoints have in config.json and new ones in generation_config.json. They have no
# effect: a request chooses its sampling parameters.
OF_SAMPLING = _names("""
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature tf_legacy_loss top_k
    top_p typical_p
""")
# Names of fields that give the longest sequence. Only max_position_embeddings is read.
LENGTHS = _names("""
    max_seq_len max_seq_length max_sequence_length model_max_length n_ctx n_positions seq_len seq_length
""")
HARMLESS = OF_TRAINING | OF_OTHER_TASKS | OF_PRECISION | OF_TRANSFORMERS | TOKEN_IDS | OF_SAMPLING | LENGTHS
HARMLESS_WORDS = ("dropout",)  # words in names of fields that matter in training only
TELLING_WORD = "quant"  # names of fields that tell how the weights are stored, by any program
# Further names for a size of the model. Files have one beside the name that the family's reader asks for.
REPEATS: Mapping[str, frozenset[str]] = {
    "head_size": _names("attention_head_size d_head d_kv head_dim head_size kv_channels"),
    "hidden_size": _names(
        "d_model dim embed_dim embedding_size hidden_size model_dim n_embd n_embed word_embed_proj_dim"
    ),
    "intermediate_size": _names("d_ff d_inner ffn_dim ffn_hidden_size inner_dim intermediate_size n_inner"),
    "num_heads": _names("attention_heads n_head n_heads num_attention_heads num_heads"),
    "num_kv_heads": _names("multi_query_group_num n_head_kv n_kv_heads num_key_value_heads num_kv_heads"),
    "num_layers": _names("n_layer n_layers num_hidden_layers num_layers"),
}
WINDOWS = ("sliding_window", "sliding_window_size", "attention_window", "window_size")


class Sizes(Protocol):
    """Sizes of the model that decide which value of a field is neutral, besides those that REPEATS names."""

    @property
    def head_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def ropes(self) -> tuple[Rope, ...]: ...

    @property
    def query_key_norm(self) -> bool: ...


def unknown_fields(fields: Fields, model_type: str, sizes: Sizes) -> tuple[str, ...]:
    """Names of fields that the family's reader did not ask for, for a warning. ModelError names the first that must be
    refused: one that may change the result, or any in an object inside, whose fields have a meaning together. It is an
    UnsupportedOption if transformers reads the field in models of this type."""
    unknown = []
    for prefix, name, value in _unread(fields, sizes):
        field = prefix + shown_name(name)
        refusal = (
            f"{fields.where}: {field} is {described(value)}, which is not supported for {model_type}: if "
            "the model computes the same without this field, remove it"
        )
        if not prefix and name in family_fields()[model_type]:
            raise UnsupportedOption(refusal, name)
        if prefix or name in transformers_fields() or TELLING_WORD in name.lower():
            raise ModelError(refusal)
        unknown.append(field)
    return tuple(unknown)


def _unread(fields: Fields, sizes: Sizes, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yields the names and values of fields that may matter and that the reader did not ask for. `prefix`: the names of
    the objects around them."""
    for name, value in fields.raw.items():
        if name in fields.opened:
            yield from _unread(fields.opened[name], sizes, f"{prefix}{name}.")
        elif name not in fields.asked and not _is_harmless(name) and not _is_neutral(name, value, fields.raw, sizes):
            yield prefix, name, value


@cache
def family_fields() -> Mapping[str, frozenset[str]]:
    """{model type of a family: the fields that transformers has for this type}."""
    lines = Path(__file__).with_name("family_fields.txt").read_text().splitlines()
    return {name: _names(names) for name, _, names in (line.partition(": ") for line in lines)}


@cache
def transformers_fields() -> frozenset[str]:
    return frozenset(Path(__file__).with_name("transformers_fields.txt").read_text().split())


def _is_harmless(name: str) -> bool:
    return name in HARMLESS or any(word in name for word in HARMLESS_WORDS)


def _is_neutral(name: str, value: object, raw: Mapping[str, Any], sizes: Sizes) -> bool:
    """Whether the model computes the same with this value of the field as without the field."""
    if value is None or value is False or value in ([], {}, ""):
        return True
    if name in WINDOWS or name == "max_window_layers":
        return _sees_everything(raw, sizes)
    if name == "layer_types":
        return isinstance(value, list) and all(kind == "full_attention" for kind in value)
    if name == "no_rope_layers":  # in this field, 1 means that the layer has positions
        return isinstance(value, list) and all(is_number(kind) and kind == 1 for kind in value)
    if any(name in names and value == getattr(sizes, size) for size, names in REPEATS.items()):
        return not isinstance(value, bool)
    if value == 0 and (name.startswith("num_") or name.endswith("_size")):
        return True  # the model has no such part
    neutral = _neutral_values(sizes).get(name)
    if isinstance(neutral, float):
        return is_number(value) and math.isclose(value, neutral, rel_tol=1e-6)  # type: ignore[arg-type]
    return neutral is not None and value == neutral


def _sees_everything(raw: Mapping[str, Any], sizes: Sizes) -> bool:
    """Whether all layers see all tokens: they have no window, or one that is as long as the longest sequence."""
    if raw.get("use_sliding_window") is False:
        return True
    widths = [raw[name] for name in WINDOWS if raw.get(name) is not None]
    return all(is_number(width) and width >= sizes.max_positions for width in widths)


def _neutral_values(sizes: Sizes) -> Mapping[str, float | str | bool]:
    scale, size = sizes.head_size**-0.5, float(sizes.head_size)
    turned = float(sizes.ropes[0].size) if sizes.ropes else size
    return {
        "attention_multiplier": scale,
        "attention_scale": scale,
        "embedding_multiplier": 1.0,
        "hidden_activation": "silu",
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "logit_scale": 1.0,
        "logits_scaling": 1.0,
        "original_max_position_embeddings": float(sizes.max_positions),
        "partial_rotary_factor": turned / size,
        "position_embedding_type": "rope",
        "query_pre_attn_scalar": size,
        "residual_multiplier": 1.0,
        "rotary_dim": turned,
        "rotary_pct": turned / size,
        "use_qk_norm": sizes.query_key_norm,
    }
