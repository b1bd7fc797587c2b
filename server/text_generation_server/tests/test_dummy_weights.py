"""Random weights have the names, shapes and types of a checkpoint's weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from shard_tools import CPU, make_checkpoint, make_platform

from text_generation_common.errors import WeightsError
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import shapes
from text_generation_server.models import get_model
from text_generation_server.models.loading import DummyFiles
from text_generation_server.weights.files import HubAccess
from text_generation_server.weights.prepare import prepare_without_weights

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 32},
}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_names_and_shapes_are_those_of_a_checkpoint(tmp_path: Path, variant: str) -> None:
    make_checkpoint(tmp_path, **VARIANTS[variant])
    tensors = load_file(tmp_path / "model.safetensors")
    assert shapes(read_config(tmp_path)) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def write_config(path: Path) -> None:
    config = {
        "model_type": "llama", "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))


def test_a_tensor_and_its_slices_are_the_same_every_time_and_no_two_alike(tmp_path: Path) -> None:
    write_config(tmp_path)
    first, again = (DummyFiles(read_config(tmp_path), CPU, torch.bfloat16) for _ in range(2))
    up, gate = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "gate"))
    assert torch.equal(first.get(up), again.get(up)) and first.get(up).dtype == torch.bfloat16
    assert not torch.equal(first.get(up), first.get(gate))
    assert first.get_slice(up, 1, 8, 24).shape == (48, 16)
    assert torch.equal(first.get_slice(up, 0, 4, 8), again.get_slice(up, 0, 4, 8))
    assert first.get("model.norm.weight").eq(1).all()


def test_a_model_is_made_from_config_json_only(tmp_path: Path) -> None:
    write_config(tmp_path)
    config = read_config(tmp_path)
    files = DummyFiles(config, CPU, torch.float32)
    get_model(files, config, make_platform(), torch.float32, 64, lambda: None)


def test_preparing_without_weights_asks_for_config_and_tokenizer_only(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(WeightsError, match=r"has no tokenizer\.json"):
        prepare_without_weights(str(tmp_path), HubAccess())
    (tmp_path / "tokenizer.json").write_text("{}")
    assert prepare_without_weights(str(tmp_path), HubAccess()) == tmp_path
    with pytest.raises(WeightsError, match=r"owner/name is not a directory"):
        prepare_without_weights("owner/name", HubAccess())
