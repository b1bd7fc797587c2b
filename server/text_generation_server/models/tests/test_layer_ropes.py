"""Ropes that differ between layers with and without a window, in the spellings of old and new files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import read_config
from text_generation_common.models.names import QkvLayout
from text_generation_server.models.decoder import qkv_parts
from text_generation_server.models.loading import LayerPart
from text_generation_server.models.parts import split_model

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4,
    "max_position_embeddings": 512, "sliding_window": 100, "head_dim": 16,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 8.0}


def read(folder: Path, model_type: str, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(SIZES | {"model_type": model_type} | changes))
    return read_config(folder)


def ropes(config: ModelConfig) -> list[tuple[float, str, float]]:
    """(theta, kind of scaling, its factor) of each layer."""
    found = [rule.rope for rule in config.rules]
    return [(rope.theta, rope.scaling.kind, rope.scaling.factor) for rope in found if rope is not None]


@pytest.mark.parametrize(
    ("model_type", "changes", "everywhere", "in_windows"),
    [
        ("gemma3_text", {}, (1e6, "default", 1.0), (1e4, "default", 1.0)),
        ("gemma3_text", {"rope_scaling": LINEAR}, (1e6, "linear", 8.0), (1e4, "default", 1.0)),
        ("gemma3_text", {"rope_theta": 3e5, "rope_local_base_freq": 77.0}, (3e5, "default", 1.0), (77, "default", 1.0)),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": LINEAR | {"rope_theta": 3e5}, "sliding_attention": None}},
            (3e5, "linear", 8.0),
            (1e4, "default", 1.0),
        ),
        ("olmo3", {"rope_scaling": LINEAR}, (5e5, "linear", 8.0), (5e5, "default", 1.0)),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 300.0}}},
            (5e5, "default", 1.0),
            (300.0, "default", 1.0),
        ),
    ],
)
def test_each_kind_of_layer_has_its_rope(
    tmp_path: Path, model_type: str, changes: dict[str, Any], everywhere: object, in_windows: object
) -> None:
    full = {"gemma3_text": (5,), "olmo3": (3,)}[model_type]
    config = read(tmp_path, model_type, **changes)
    assert ropes(config) == [everywhere if i in full else in_windows for i in range(6)]
    assert [rule.window for rule in config.rules] == [None if i in full else 100 for i in range(6)]


@pytest.mark.parametrize("model_type", ["gemma3_text", "olmo3"])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_parameters": LINEAR}, "rope_parameters is an object, and must be an object with the fields full_att"),
        ({"rope_parameters": {"full_attention": {}}, "rope_scaling": LINEAR}, "rope_scaling is an object, and must be"),
        ({"rope_parameters": {"full_attention": {"factor": 7}}}, "rope_parameters: full_attention: factor is 7"),
        ({"sliding_window": None}, "sliding_window is null, and needs a value"),
        ({"rope_local_base_freq": "a"}, "rope_local_base_freq is the string"),
    ],
)
def test_ropes_that_cannot_be_read_are_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError) as refused:
        read(tmp_path, model_type, **changes)
    assert told in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_the_flags_stretch_no_model_with_several_ropes(tmp_path: Path) -> None:
    read(tmp_path, "gemma3_text")
    with pytest.raises(ModelError, match="not supported for a gemma3_text, whose layers have different ropes"):
        read_config(tmp_path, "linear", 2.0)
    read(tmp_path, "gemma3_text", rope_local_base_freq=1e6)
    assert {kind for _, kind, _ in ropes(read_config(tmp_path, "linear", 2.0))} == {"linear"}


# A rank's queries, keys and values are found in tensors that hold them group by group.
SIZE = 8


def rows_of(part: LayerPart) -> list[int]:
    rows = torch.tensor(part.rows)
    return (rows if part.picks is None else rows.view(-1, part.group)[:, part.picks].flatten()).tolist()


@pytest.mark.parametrize(("heads", "keys"), [(4, 1), (4, 2), (8, 2), (4, 4)])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_rank_picks_its_heads_of_the_groups(
    tmp_path: Path, heads: int, keys: int, size: int, interleaved: bool
) -> None:
    raw = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": heads * SIZE, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": keys,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_config(tmp_path)
    config = replace(config, names=replace(config.names, qkv=QkvLayout.groups))
    rope = config.rules[0].rope
    assert rope is not None
    rope = replace(rope, interleaved=interleaved)
    order = [*range(0, SIZE, 2), *range(1, SIZE, 2)] if interleaved else list(range(SIZE))
    of_key = heads // keys

    def rows(place: int, numbers: list[int]) -> list[int]:
        return [place * SIZE + number for number in numbers]

    for rank in range(size):
        split = split_model(config, rank, size, 320)
        queries, key, value = qkv_parts(config, rope, split, config.names.layer(0))
        places = [head // of_key * (of_key + 2) + head % of_key for head in split.query_heads]
        assert rows_of(queries) == [row for place in places for row in rows(place, order)]
        first_keys = [group * (of_key + 2) + of_key for group in split.kv_heads]
        assert rows_of(key) == [row for place in first_keys for row in rows(place, order)]
        assert rows_of(value) == [row for place in first_keys for row in rows(place + 1, list(range(SIZE)))]
