"""Models with the fields of published config.json files and small sizes, compared with transformers on the same
weights: the server reads the files, in the forms of all years, as transformers does."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from fallback_checkpoints import drawn, expected_logprobs
from model_types import FALLBACK, NATIVE, published, standing
from shard_tools import generate, random_ids, warm_runner

from text_generation_common.models.config import MULTIMODAL, SIZES

# `pytest -m slow` runs the others.
ALWAYS = ("phi-1", "Phi-4-mini", "Gemma 2 27B", "Qwen/Qwen3-Coder-480B-A35B-Instruct", "Mistral-7B-Instruct-v0.3")
SERVED = [
    pytest.param(line, id=line["model"], marks=() if line["model"] in ALWAYS else pytest.mark.slow)
    for line in published()
    if line["outcome"] in (NATIVE, FALLBACK)
]
HIDDEN, HEADS, LAYERS, HEAD = 64, 4, 4, 16
# The sizes of the small models, by all names that files have for them.
SMALL: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "projection_dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"), HEAD),
    "vocab_size": 320, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, "image_token_index": 3,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 32, "qk_rope_head_dim": 8, "rotary_dim": 8,
    "image_size": 28, "patch_size": 14, "mm_tokens_per_image": 4,
}  # fmt: skip
PROMPT, NEW, TOLERANCE = 40, 4, 2e-3


def small(raw: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """The fields with small sizes. `name`: that of the field which holds them."""
    made = {key: small(value, key) if isinstance(value, dict) else value for key, value in raw.items()}
    left_out = SIZES if name == "text_config" else ()  # where they are transformers' defaults
    made |= {key: size for key, size in SMALL.items() if key in left_out or made.get(key)}
    heads = next((raw[key] for key in ("num_attention_heads", "n_head", "n_heads") if key in raw), None)
    for key in ("num_key_value_heads", "num_kv_heads"):
        if made.get(key) is not None:
            made[key] = {1: 1, heads: HEADS}.get(made[key], 2)
    for key in ("sliding_window", "sliding_window_size"):
        if made.get(key) is not None and made[key] < raw.get("max_position_embeddings", 2**17):
            made[key] = 20
    if "layer_types" in made:
        made["layer_types"] = made["layer_types"][:LAYERS]
    rope = made.get("rope_scaling") or {}
    pairs = int((8 if "qk_rope_head_dim" in raw else HEAD) * raw.get("partial_rotary_factor", 1)) // 2
    rope |= {key: rope[key][:pairs] for key in ("long_factor", "short_factor") if key in rope}
    return {key: value for key, value in made.items() if key != "quantization_config"}


@pytest.mark.parametrize("line", SERVED)
def test_a_small_model_with_a_published_config_is_computed_as_by_transformers(
    line: Mapping[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    raw = small(line["config"])
    config = AutoConfig.for_model(**deepcopy(raw))  # transformers writes into the objects inside
    auto = AutoModelForImageTextToText if raw["model_type"] in MULTIMODAL else AutoModelForCausalLM
    theirs = drawn(tmp_path, auto.from_config(config, attn_implementation="eager", dtype=torch.float32))
    (tmp_path / "config.json").write_text(json.dumps(raw | {"dtype": "float32"}))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    client = generate(warm_runner(tmp_path), random_ids(PROMPT), NEW)
    expected = expected_logprobs(theirs, random_ids(PROMPT), client.tokens[7])
    ours, chosen = torch.tensor(client.logprobs[7]), torch.tensor(client.tokens[7])
    torch.testing.assert_close(ours, expected.gather(1, chosen[:, None])[:, 0], atol=TOLERANCE, rtol=0)
    assert (expected.max(dim=1).values - ours).max() <= TOLERANCE


# The gate serves, or refuses with the stated reason, models whose config.json was read from public repositories.
#
# A line of `published_configs.jsonl` has the repository and the commit that its file was read from, or the package and
# the SHA-256 of its wheel; the path in it; and the file's fields. The first seven lines leave out fields that say
# nothing about the architecture: the versions of programs, the names of tokenizers and folders, and how weights were
# initialized. A `.py` file quotes the fields of a config.json. `beside` holds other files of the model's folder.
@pytest.mark.parametrize("line", published(), ids=lambda line: line["model"])
def test_a_published_config_is_served_or_refused_as_stated(line: Mapping[str, Any]) -> None:
    found = standing(line["config"], line.get("beside"))
    assert (found.reason or found.kind).startswith(line["outcome"]) and line["outcome"]


def test_lines_name_their_files_and_all_outcomes_occur() -> None:
    lines = published()
    read = [line for line in lines if "package" not in line]
    assert all(len(line["commit"]) == 40 and line["repository"] and line["path"] for line in read) and len(read) >= 60
    assert all(len(line["sha256"]) == 64 and line["path"] for line in lines if line not in read)
    assert len({line["model"] for line in lines}) == len(lines)
    assert len({line["config"]["model_type"] for line in lines}) >= 25
    assert {NATIVE, FALLBACK} < {line["outcome"] for line in lines}
