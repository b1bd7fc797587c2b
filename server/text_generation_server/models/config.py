"""Reads config.json and generation_config.json. transformers is not needed, and not imported, to serve."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from text_generation_server.errors import ModelError
from text_generation_server.layers.rotary import RopeScaling

ROPE_KINDS = ("default", "linear", "dynamic", "llama3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int  # how long a sequence may be, scaling included
    rope_theta: float
    rope_scaling: RopeScaling
    rope_base_positions: int  # max_position_embeddings: where `dynamic` scaling begins
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]


def read_config(path: Path, rope_scaling: str | None = None, rope_factor: float | None = None) -> ModelConfig:
    """`rope_scaling` and `rope_factor` are the launcher's flags; they win over the file. ModelError names the field."""
    raw = _read_json(path / "config.json")
    if raw is None:
        raise ModelError(f"{path} has no config.json: is it a model directory?")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path / 'config.json'}: hidden_act {raw['hidden_act']!r} is not supported yet, only 'silu'")
    positions = int(raw.get("max_position_embeddings", 2048))
    theta, scaling = _rope(raw, path)
    longest = round(positions * scaling.factor) if scaling.kind == "dynamic" else positions
    if rope_scaling or rope_factor:
        scaling = RopeScaling(rope_scaling or "linear", rope_factor or 1.0)
        longest = round(positions * scaling.factor)
    try:
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        return ModelConfig(
            model_type=str(raw["model_type"]),
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_size=int(raw.get("head_dim") or hidden // heads),
            max_positions=longest,
            rope_theta=theta,
            rope_scaling=scaling,
            rope_base_positions=positions,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            dtype=_dtype(raw),
            eos_token_ids=_eos_token_ids(raw, _read_json(path / "generation_config.json") or {}),
        )
    except KeyError as missing:
        raise ModelError(f"{path / 'config.json'} has no field {missing}") from None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def _rope(raw: dict[str, Any], path: Path) -> tuple[float, RopeScaling]:
    """(theta, scaling), in the spelling of transformers 5 (rope_parameters) or before (rope_theta, rope_scaling)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"{path / 'config.json'}: rope type {kind!r} is not supported yet, only {', '.join(ROPE_KINDS)}"
        )
    scaling = RopeScaling(
        kind=kind,
        factor=float(rope.get("factor", 1.0)),
        original_max_positions=int(rope.get("original_max_position_embeddings", 0)),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
    )
    if kind == "llama3" and not scaling.original_max_positions:
        raise ModelError(f"{path / 'config.json'}: llama3 scaling needs original_max_position_embeddings")
    return theta, scaling


def _dtype(raw: dict[str, Any]) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return DTYPES.get(name, torch.float32)


def _eos_token_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in (config, generation):
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [value] if value is not None else [])
    return tuple(sorted(ids))
