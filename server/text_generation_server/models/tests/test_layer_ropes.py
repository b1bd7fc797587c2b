"""Ropes that differ between layers with and without a window, in the spellings of old and new files."""

import json
from pathlib import Path
from typing import Any

import pytest

from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import read_config

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
