"""Checkpoints of all families as they lie on disks: old names, leftovers, several files; and what each rank reads of
them."""

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import SHAPE, VARIANTS, make_family
from safetensors.torch import load_file, save_file
from shard_tools import make_platform

from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import MULTIMODAL, read_config
from text_generation_common.models.families import FAMILIES
from text_generation_common.models.tensors import shapes
from text_generation_server.distributed import Alone, Group
from text_generation_server.models import get_model
from text_generation_server.weights.files import SafetensorsFiles

FIRST = {model_type: name for name, (model_type, _) in reversed(VARIANTS.items())}
every_layout = pytest.mark.parametrize(
    "variant", [*FIRST.values(), "falcon, as 40B", "falcon, as RW", "gpt_bigcode, many keys"]
)
every_family = pytest.mark.parametrize("model_type", FIRST)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of a variant, made once."""

    @cache
    def make(variant: str) -> Path:
        path = tmp_path_factory.mktemp("model")
        make_family(path, variant)
        return path

    return make


def buffers_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    """What old versions of transformers saved beside the weights."""
    found = {}
    for i in range(config.num_layers):
        attention = config.names.layer(i).queries.rpartition(".")[0]
        found[f"{attention}.rotary_emb.inv_freq"] = torch.ones(8)
        if not attention.endswith("self_attn"):
            found[f"{attention}.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
            found[f"{attention}.masked_bias"] = torch.tensor(-1e9)
    return found


def write_as_of_old(source: Path, target: Path) -> None:
    """Names without their first word, with buffers; a tied head is stored a second time. The tensors are in two files
    with an index, beside files of other programs with the same tensors."""
    tensors = load_file(source / "model.safetensors")
    config = read_config(source)
    first = config.names.embedding.partition(".")[0] + "."
    embedding = tensors[f"{config.names.embedding}.weight"]
    tensors = {name.removeprefix(first): tensor for name, tensor in tensors.items()}
    tensors |= {name.removeprefix(first): tensor for name, tensor in buffers_of(config).items()}
    if config.tie_word_embeddings:
        tensors[f"{config.names.head}.weight"] = embedding.clone()
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({name: tensor for name, tensor in tensors.items() if where[name] == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    for stray in ("model.safetensors", "consolidated.safetensors", "adapter_model.safetensors"):
        save_file({"layers.0.attention.wq.weight": torch.ones(2)}, target / stray)


class NotingFiles(SafetensorsFiles):
    """Notes what is read: each tensor's name, and the part of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read: list[tuple[str, torch.Tensor]] = []

    def get(self, name: str) -> torch.Tensor:
        self.read.append((name, super().get(name)))
        return self.read[-1][1]

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        before = len(self.read)
        tensor = super().get_slice(name, dim, start, stop)
        if len(self.read) == before:  # otherwise it was read by `get`
            self.read.append((name, tensor))
        return tensor


def load(path: Path, rank: int = 0, size: int = 1) -> NotingFiles:
    files, platform = NotingFiles(path), make_platform(group=Group(rank, size, Alone()))
    get_model(files, read_config(path), platform, torch.float32, 64, lambda: None)
    return files


@every_family
def test_the_tensors_of_an_old_checkpoint_are_the_same(
    tmp_path: Path, checkpoint: Callable[[str], Path], model_type: str
) -> None:
    path = checkpoint(FIRST[model_type])
    write_as_of_old(path, tmp_path)
    config = read_config(path)
    new, old = load(path).read, load(tmp_path).read
    if config.tie_word_embeddings:
        old = [(name, tensor) for name, tensor in old if name != f"{config.names.head}.weight"]
    assert len(new) == len(old) and all(torch.equal(a, b) for (_, a), (_, b) in zip(new, old, strict=True))


def whole_on_every_rank(config: ModelConfig) -> set[str]:
    """Matrices that every rank needs whole."""
    routers = {f"{config.names.layer(i).router}.weight" for i in range(config.num_layers)}
    return routers | {f"{config.names.positions}.weight"}


@every_layout
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_its_part_of_each_matrix_once(checkpoint: Callable[[str], Path], variant: str, size: int) -> None:
    path = checkpoint(variant)
    config = read_config(path)
    for rank in range(size):
        read = Counter[str]()
        for name, tensor in load(path, rank, size).read:
            read[name] += tensor.numel()
        for name, shape in shapes(config).items():
            is_matrix = len(shape) > 1 and shape[0] > 1 and not name.endswith("bias")
            if not is_matrix or name in whole_on_every_rank(config):
                continue
            most = torch.Size(shape).numel() * part_of(config, name, size)
            assert 0 < read[name] <= most, name


def part_of(config: ModelConfig, name: str, size: int) -> float:
    """The largest part of a matrix that a rank of `size` needs."""
    heads, keys = config.num_heads, config.num_kv_heads
    own, own_keys = heads / size, max(1, keys / size)
    for i in range(config.num_layers):
        names = config.names.layer(i)
        sizes = {names.queries: (own, heads), names.keys: (own_keys, keys), names.values: (own_keys, keys)}
        if names.queries == names.keys:
            sizes = {names.queries: (own + 2 * own_keys, heads + 2 * keys)}
        if (layer := name.removesuffix(".weight")) in sizes:
            part, of = sizes[layer]
            return part / of
    return 1.3 / size if config.vocab_size in shapes(config)[name] else 1 / size


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """A config of transformers 5 as version 4 wrote it."""
    rope = config.pop("rope_parameters", None)
    config["torch_dtype"] = config.pop("dtype", "float32")
    if rope is None or "rope_theta" not in rope:  # older versions had no ropes by the kind of layer
        return config | {"rope_parameters": rope}
    rope = dict(rope)
    neox = config["model_type"] == "gpt_neox"
    config["rotary_emb_base" if neox else "rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["rotary_pct" if neox else "partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if (kind := rope.pop("rope_type")) != "default":
        config["rope_scaling"] = {"type": kind, **rope}
    return config


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_spellings_of_config_json_are_the_same_model(tmp_path: Path, variant: str) -> None:
    from transformers import AutoConfig

    model_type, changes = VARIANTS[variant]
    AutoConfig.for_model(model_type, **{**SHAPE, **changes}).save_pretrained(tmp_path)
    new, file = read_config(tmp_path), tmp_path / "config.json"
    file.write_text(json.dumps(old_spelling(json.loads(file.read_text()))))
    assert read_config(tmp_path) == new


@every_family
def test_end_tokens_may_be_a_list_in_either_file(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoConfig

    changes = VARIANTS[FIRST[model_type]][1]
    AutoConfig.for_model(model_type, **{**SHAPE, **changes, "eos_token_id": [7, 5]}).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    assert read_config(tmp_path).eos_token_ids == (5, 7, 9)
    assert model_type in FAMILIES


def test_the_text_models_inside_other_models_are_of_our_families() -> None:
    assert set(MULTIMODAL.values()) <= set(FAMILIES)
