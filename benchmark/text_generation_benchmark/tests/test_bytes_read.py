"""The bytes of a step: weights that it reads, of experts the chosen ones, and what windows leave to read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from text_generation_benchmark.bytes_read import kv_bytes, weight_bytes
from text_generation_benchmark.checkpoint import write_without_weights
from text_generation_benchmark.shapes import LlamaShape
from text_generation_common.models.architecture import ModelConfig, Moe
from text_generation_common.models.config import read_config

TINY = LlamaShape(hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, vocabulary=2112)
NORMS = 5 * 64  # two of each layer, and the last


def config_of(folder: Path, shape: LlamaShape) -> ModelConfig:
    write_without_weights(folder, shape)
    return read_config(folder)


def test_an_embedding_counts_where_it_is_the_head_too(tmp_path: Path) -> None:
    body = 2 * (2 * TINY.layer_weights + NORMS)
    assert weight_bytes(config_of(tmp_path, TINY)) == body + 2 * TINY.head_weights
    assert weight_bytes(config_of(tmp_path, replace(TINY, tied=False))) == body + 2 * TINY.head_weights


def test_a_window_hides_keys_of_its_layer_only(tmp_path: Path) -> None:
    config = config_of(tmp_path, TINY)
    windowed = replace(config, rules=(replace(config.rules[0], window=8), config.rules[1]))
    assert kv_bytes(windowed, 100) == (8 + 100) * TINY.kv_numbers // 2 * 2
    assert kv_bytes(windowed, 4) == kv_bytes(config, 4)


def test_experts_count_as_far_as_they_are_read_and_routers_always(tmp_path: Path) -> None:
    fields = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2112, "tie_word_embeddings": True}
    fields |= {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 64,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config(tmp_path)
    assert isinstance(config.moe, Moe)
    each = 3 * 64 * 32 * 2
    assert weight_bytes(config) - weight_bytes(config, 2.5) == pytest.approx(5.5 * each)
    assert weight_bytes(config, 0) == pytest.approx(weight_bytes(config) - 8 * each)
