"""Writes a Llama checkpoint of a given shape with random weights and a tokenizer that fits it, for benchmarks."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

END_OF_TEXT = 2


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    max_positions: int = 4096


SHAPES = {
    "m100": Shape(hidden=768, intermediate=2048, layers=12, heads=12, kv_heads=4, vocabulary=32000),
    "m1b": Shape(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocabulary=32000),
}


def write_checkpoint(out: Path, shape: Shape, tokenizer_from: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """config.json, model.safetensors (tied embeddings) and the tokenizer. The same weights every time.

    The embedding of the end of text is zero: its logit is never the largest, so every server makes as many tokens as
    were asked for, those that cannot ignore the end of a text too.
    """
    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype)

    head_size = shape.hidden // shape.heads
    tensors = {"model.embed_tokens.weight": matrix(shape.vocabulary, shape.hidden)}
    tensors["model.embed_tokens.weight"][END_OF_TEXT] = 0
    tensors["model.norm.weight"] = torch.ones(shape.hidden, dtype=dtype)
    for i in range(shape.layers):
        layer = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", shape.hidden, shape.hidden),
            ("self_attn.k_proj", shape.kv_heads * head_size, shape.hidden),
            ("self_attn.v_proj", shape.kv_heads * head_size, shape.hidden),
            ("self_attn.o_proj", shape.hidden, shape.hidden),
            ("mlp.gate_proj", shape.intermediate, shape.hidden),
            ("mlp.up_proj", shape.intermediate, shape.hidden),
            ("mlp.down_proj", shape.hidden, shape.intermediate),
        ):
            tensors[f"{layer}.{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(shape.hidden, dtype=dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(_config(shape, dtype), indent=2))
    tokenizer = json.loads((tokenizer_from / "tokenizer.json").read_text())
    (out / "tokenizer.json").write_text(json.dumps(with_fillers(tokenizer, shape.vocabulary), ensure_ascii=False))
    shutil.copy(tokenizer_from / "tokenizer_config.json", out / "tokenizer_config.json")


def with_fillers(tokenizer: dict[str, Any], size: int) -> dict[str, Any]:
    """The tokenizer with words up to `size` that no merge leads to: no text becomes one, and every id has a text.

    A model with random weights picks any id; without a text for it some servers would send nothing, and decode less.
    """
    vocabulary = tokenizer["model"]["vocab"]
    fillers = {f"Ġfiller{i}": i for i in range(len(vocabulary), size)}
    return tokenizer | {"model": tokenizer["model"] | {"vocab": vocabulary | fillers}}


def _config(shape: Shape, dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": END_OF_TEXT,
    }
