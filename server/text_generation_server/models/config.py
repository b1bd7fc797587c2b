"""Reads config.json and generation_config.json, without transformers, which is not imported while serving."""

from dataclasses import replace
from pathlib import Path

import torch

from text_generation_common import quantization
from text_generation_common.model_files import ModelFileError, find_json_object, read_json_object
from text_generation_server.errors import ModelError
from text_generation_server.layers.rotary import RopeScaling
from text_generation_server.models.architecture import ModelConfig
from text_generation_server.models.families import FAMILIES
from text_generation_server.models.fields import unknown_fields
from text_generation_server.models.rope_config import MAX_FACTOR, MAX_POSITIONS, read_rope
from text_generation_server.models.values import Fields, is_whole, shown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Names of types that are not computed in: checkpoints of these types are computed in float32. "auto" names no type.
OTHER_DTYPES = {"auto": torch.float32, "float64": torch.float32}

# Largest accepted sizes. They are several times those of the largest models, and small enough for the model to be
# checked before memory is allocated.
MAX_VOCABULARY = 2**24
MAX_WIDTH = 2**20
MAX_LAYERS = 2**12
MAX_HEADS = 2**12
MIN_HEAD_SIZE, MAX_HEAD_SIZE = 4, 2**12
MAX_TOKEN_ID = 2**31 - 1
DEFAULT_POSITIONS = 2048  # transformers' default for a Llama
DEFAULT_EPS = 1e-6


def read_config(path: Path, rope_scaling: str | None = None, rope_factor: float | None = None) -> ModelConfig:
    """Reads the config of a model directory. The launcher's flags `rope_scaling` and `rope_factor` override the file.
    Raises ModelError, whose text of one line names the field that is missing, wrong or not supported.
    """
    file, generation_file = path / "config.json", path / "generation_config.json"
    try:
        raw, raw_generation = read_json_object(file), find_json_object(generation_file) or {}
    except ModelFileError as error:
        raise ModelError(str(error)) from None
    fields = Fields(raw, str(file))
    model_type = fields.word("model_type")
    if model_type not in FAMILIES:
        raise ModelError(f"{file}: model type {shown(model_type)} is not supported yet, only: {', '.join(FAMILIES)}")
    if reason := quantization.refusal(path, raw):
        raise ModelError(reason)
    config = _config(fields, Fields(raw_generation, str(generation_file)))
    unknown = unknown_fields(raw, model_type, config, str(file))
    return replace(_stretched(config, rope_scaling, rope_factor), unknown_fields=unknown)


def _config(fields: Fields, generation: Fields) -> ModelConfig:
    """The config without the launcher's flags: `max_positions` is the length for which the weights were trained."""
    if fields.word("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", '"silu": other activations are not supported yet')
    positions = fields.whole("max_position_embeddings", 1, MAX_POSITIONS, DEFAULT_POSITIONS)
    theta, scaling = read_rope(fields, positions)
    hidden = fields.whole("hidden_size", 1, MAX_WIDTH)
    heads = fields.whole("num_attention_heads", 1, MAX_HEADS)
    model_type = fields.word("model_type")
    return ModelConfig(
        model_type=model_type,
        names=FAMILIES[model_type].names,
        vocab_size=fields.whole("vocab_size", 1, MAX_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size", 1, MAX_WIDTH),
        num_layers=fields.whole("num_hidden_layers", 1, MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, heads),
        head_size=_head_size(fields, hidden, heads),
        max_positions=positions,
        rope_theta=theta,
        rope_scaling=scaling,
        rope_base_positions=positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 1, DEFAULT_EPS),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        dtype=_dtype(fields),
        eos_token_ids=tuple(sorted({*_token_ids(fields), *_token_ids(generation)})),
    )


def _kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.whole("num_key_value_heads", 1, heads, heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    return kv_heads


def _head_size(fields: Fields, hidden: int, heads: int) -> int:
    if fields.has("head_dim"):
        size = fields.whole("head_dim", MIN_HEAD_SIZE, MAX_HEAD_SIZE)
    elif hidden % heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads ({heads}) where there is no head_dim")
    else:
        size = hidden // heads
    if size % 2 or not MIN_HEAD_SIZE <= size <= MAX_HEAD_SIZE:
        allowed = f"an even number from {MIN_HEAD_SIZE} to {MAX_HEAD_SIZE} (rotary positions turn pairs)"
        raise ModelError(f"{fields.where}: the head size is {size}, and must be {allowed}")
    return size


def _dtype(fields: Fields) -> torch.dtype:
    field = "dtype" if fields.has("dtype") else "torch_dtype"
    known = DTYPES | OTHER_DTYPES
    name = fields.word(field, "auto").removeprefix("torch.")
    if name not in known:
        raise fields.error(field, f"one of {', '.join(known)}")
    return known[name]


def _token_ids(fields: Fields) -> list[int]:
    """The ids of eos_token_id, which may be one id or a list of ids."""
    value = fields.raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_whole(id, 0, MAX_TOKEN_ID) for id in ids):
        raise fields.error("eos_token_id", "a token id (a whole number from 0), or a list of them")
    return ids


def _stretched(config: ModelConfig, flag_kind: str | None, flag_factor: float | None) -> ModelConfig:
    """The config with the rope scaling of the flags or the file, and the longest sequence that it allows."""
    scaling = config.rope_scaling
    if flag_kind or flag_factor is not None:
        factor = 1.0 if flag_factor is None else flag_factor
        if not 1 <= factor <= MAX_FACTOR:
            raise ModelError(f"--rope-factor {factor:g} is not supported: it must be from 1 to {MAX_FACTOR:g}")
        scaling = RopeScaling(flag_kind or "linear", factor)
    elif scaling.kind != "dynamic":
        return config
    longest = round(config.rope_base_positions * scaling.factor)
    if longest > MAX_POSITIONS:
        raise ModelError(
            f"rope scaling by {scaling.factor:g} makes sequences of {longest} tokens: the most is {MAX_POSITIONS}"
        )
    return replace(config, rope_scaling=scaling, max_positions=longest)
