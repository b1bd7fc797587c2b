"""The least time of a step, computed by hand for small models, and which part takes most of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from text_generation_benchmark.checkpoint import write_without_weights
from text_generation_benchmark.roofline import (
    Ceilings,
    StepPart,
    attention_part,
    bound_by,
    kv_bytes,
    least_s,
    load_work,
    matrix_numbers,
    mean_ceilings,
    step_parts,
    weight_bytes,
)
from text_generation_benchmark.shapes import LlamaShape
from text_generation_benchmark.workload import Workload
from text_generation_common.models.architecture import ModelConfig, Moe
from text_generation_common.models.config import read_config

# 4 query heads of 16, 2 key heads; in each of 2 layers 64 x (64 + 32 + 32 + 64) + 3 x 64 x 96 = 30,720 weights.
TINY = LlamaShape(hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, vocabulary=2112)
WEIGHTS, NORMS, HEAD = 2 * 30_720, 5 * 64, 2112 * 64
KV = 2 * 2 * 2 * 16  # numbers of one token: layers, keys and values, heads, head size


def config_of(folder: Path, shape: LlamaShape = TINY) -> ModelConfig:
    write_without_weights(folder, shape)
    return read_config(folder)


def experts_of(folder: Path, tied: bool) -> ModelConfig:
    fields = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2112, "tie_word_embeddings": tied}
    fields |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps(fields | {"dtype": "bfloat16"}))
    return read_config(folder)


def test_each_part_takes_what_is_slower_and_parts_add_up() -> None:
    ceilings = Ceilings(bandwidth=10.0, flops=100.0)
    parts = [StepPart("weights", 50, 400), StepPart("attention", 20, 900), StepPart("head", 10)]
    assert least_s(parts, ceilings) == 5 + 9 + 1  # not max(80 / 10, 1300 / 100) = 13
    assert bound_by(parts, ceilings) == "attention: products' peak, 60%"
    assert bound_by(parts, Ceilings(5.0, 1000.0)) == "weights: memory, 62%"  # 10 of 10 + 4 + 2
    assert ceilings.higher(Ceilings(20.0, 50.0)) == Ceilings(20.0, 100.0)
    assert mean_ceilings([ceilings, Ceilings(20.0, 50.0)]) == Ceilings(15.0, 75.0)


def test_a_decode_step_of_three_rows_of_a_hundred_tokens(tmp_path: Path) -> None:
    assert step_parts(config_of(tmp_path), rows=3, tokens=1, context=100) == (
        StepPart("weights", 2 * (WEIGHTS + NORMS), 2 * 3 * WEIGHTS),
        StepPart("attention", 3 * 100 * KV * 2, 2 * 3 * 100 * 4 * 4 * 16),
        StepPart("head", 2 * HEAD, 2 * 3 * HEAD),
        StepPart("sampling", 3 * 2112 * 4),
    )


def test_a_prompt_of_four_tokens_behind_ten_others(tmp_path: Path) -> None:
    """The tokens see 11 + 12 + 13 + 14 = 50 tokens; keys and values of 14 are read; one row needs the head."""
    weights, attention, head, _ = step_parts(config_of(tmp_path), rows=1, tokens=4, context=14)
    assert weights.flops == 2 * 4 * WEIGHTS
    assert attention == StepPart("attention", 14 * KV * 2, 2 * 50 * 4 * 4 * 16)
    assert head.flops == 2 * HEAD


def test_a_window_limits_what_each_token_sees(tmp_path: Path) -> None:
    """In one layer the tokens see 11 + 12 + 12 + 12 = 47 tokens, whose keys lie in the last 12 + 3 of 14 places."""
    config = config_of(tmp_path)
    windowed = replace(config, rules=(replace(config.rules[0], window=12), config.rules[1]))
    part = attention_part(windowed, 1, 4, 14)
    assert part.flops == (47 + 50) * 4 * 4 * 16 and part.bytes == 14 * KV * 2
    narrow = replace(config, rules=(replace(config.rules[0], window=5), config.rules[1]))
    assert attention_part(narrow, 1, 4, 14) == StepPart("attention", (8 + 14) * KV, (4 * 5 + 50) * 4 * 4 * 16)
    assert attention_part(narrow, 1, 4, 14, number_bytes=4).bytes == 2 * (8 + 14) * KV


def test_a_load_is_one_step_of_prompts_and_a_decode_step_for_each_further_token(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    work = load_work(tmp_path, Workload(3, 10, 4))
    assert work.prompts == step_parts(config, 3, 10, 10)
    assert work.step == step_parts(config, 3, 1, 12)
    ceilings = Ceilings(1e6, 1e9)
    assert work.least_s(ceilings) == pytest.approx(least_s(work.prompts, ceilings) + 3 * least_s(work.step, ceilings))


def test_a_token_is_multiplied_with_its_own_experts_only(tmp_path: Path) -> None:
    """Attention has 64 x (64 + 32 + 32 + 64) weights, the router 8 x 64, each of the 8 experts 3 x 64 x 32."""
    config = experts_of(tmp_path, tied=False)
    body = 64 * 192 + 8 * 64
    assert matrix_numbers(config, 2) == body + 2 * 3 * 64 * 32 + HEAD
    weights = step_parts(config, rows=5, tokens=1, context=1, experts_read=6.0)[0]
    assert weights.flops == 2 * 5 * (body + 2 * 3 * 64 * 32)
    norms = 3 * 64 + 2 * 16
    assert weights.bytes == 2 * (body + norms + 6 * 3 * 64 * 32)


def test_an_embedding_counts_where_it_is_the_head_too(tmp_path: Path) -> None:
    body = 2 * (2 * TINY.layer_weights + NORMS)
    assert weight_bytes(config_of(tmp_path)) == body + 2 * TINY.head_weights
    assert weight_bytes(config_of(tmp_path, replace(TINY, tied=False))) == body + 2 * TINY.head_weights


def test_a_window_hides_keys_of_its_layer_only(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    windowed = replace(config, rules=(replace(config.rules[0], window=8), config.rules[1]))
    assert kv_bytes(windowed, 100) == (8 + 100) * TINY.kv_numbers // 2 * 2
    assert kv_bytes(windowed, 4) == kv_bytes(config, 4)


def test_experts_count_as_far_as_they_are_read_and_routers_always(tmp_path: Path) -> None:
    config = experts_of(tmp_path, tied=True)
    assert isinstance(config.moe, Moe)
    each = 3 * 64 * 32 * 2
    assert weight_bytes(config) - weight_bytes(config, 2.5) == pytest.approx(5.5 * each)
    assert weight_bytes(config, 0) == pytest.approx(weight_bytes(config) - 8 * each)
