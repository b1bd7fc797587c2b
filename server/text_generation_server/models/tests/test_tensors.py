"""A model whose weights do not match its config.json is refused before any weights are read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shard_tools import ALONE, make_checkpoint, make_platform

from text_generation_common.errors import ModelError
from text_generation_common.flags.kinds import Dtype, KvCacheDtype
from text_generation_common.model_files import demo_directory
from text_generation_common.models.config import read_config
from text_generation_common.models.fitting import check_length, choose_dtype, slot_bytes
from text_generation_common.models.tensors import LinearSize, weight_bytes, with_checked_tensors
from text_generation_common.quantized.sizes import int8_bytes
from text_generation_common.weights.headers import Stored
from text_generation_server.distributed import Alone, Group
from text_generation_server.layers.weights import int8
from text_generation_server.load import DTYPES, KV_TYPES
from text_generation_server.models import get_model
from text_generation_server.models.kv_cache import KvShape, bytes_per_slot
from text_generation_server.models.model import Model
from text_generation_server.models.parts import split_model
from text_generation_server.weights.files import SafetensorsFiles


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path)
    return tmp_path


def change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Rewrites the model's file with the tensors in `changes`. A double underscore stands for a dot; None removes a
    tensor.
    """
    tensors = load_file(path / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path / "model.safetensors")


def load(path: Path, group: Group = ALONE) -> Model:
    files, read = SafetensorsFiles(path), []
    try:
        return get_model(
            files, read_config(path), make_platform(group=group), torch.float32, 64, lambda: read.append(1)
        )
    except ModelError as refused:
        assert read == [] and files.bytes_read == 0 and len(str(refused).splitlines()) == 1
        raise


RANKS = pytest.mark.parametrize("group", [Group(rank, size, Alone()) for size in (1, 2) for rank in range(size)])


@RANKS
@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("intermediate_size", 80, "mlp.gate_proj.weight has the shape [160, 64] in the weights files, and config.json"),
        ("intermediate_size", 320, "mlp.gate_proj.weight has the shape [160, 64]"),
        ("vocab_size", 300, "model.embed_tokens.weight has the shape [320, 64]"),
        ("vocab_size", 321, "config.json makes it [321, 64]"),
        (
            "head_dim",
            8,
            "self_attn.q_proj.weight has the shape [64, 64] in the weights files, and config.json makes it",
        ),
        ("head_dim", 32, "config.json makes it [128, 64]"),
        ("hidden_size", 60, "[320, 64] in the weights files, and config.json makes it [320, 60]"),
        ("hidden_size", 68, "config.json makes it [320, 68]"),
        ("num_key_value_heads", 4, "self_attn.k_proj.weight has the shape [32, 64]"),
        ("num_key_value_heads", 1, "self_attn.k_proj.weight has the shape [32, 64]"),
        ("num_hidden_layers", 2, "have a tensor model.layers.2."),
        ("num_hidden_layers", 4, "have no tensor model.layers.3."),
        ("attention_bias", True, "have no tensor model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_sizes_that_differ_from_the_weights_are_refused_by_every_rank(
    model: Path, group: Group, field: str, value: object, named: str
) -> None:
    change_config(model, **{field: value})
    with pytest.raises(ModelError) as refused:
        load(model, group)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    "name",
    ["self_attn.q_norm.weight", "self_attn.q_proj.bias", "mlp.down_proj.bias", "post_feedforward_layernorm.weight"],
)
def test_a_tensor_of_another_kind_of_model_is_refused_by_name(model: Path, name: str) -> None:
    change_tensors(model, **{f"model.layers.1.{name}": torch.zeros(16)})
    with pytest.raises(ModelError, match=rf"have a tensor model\.layers\.1\.{name}"):
        load(model)


def test_a_shape_with_the_same_number_of_elements_is_another_shape(model: Path) -> None:
    change_tensors(model, model__norm__weight=torch.ones(8, 8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has the shape \[8, 8\]"):
        load(model)


def test_buffers_of_old_checkpoints_are_passed_over(model: Path) -> None:
    change_tensors(model, **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(3)})
    load(model)


@RANKS
def test_a_vocabulary_that_is_padded_for_the_ranks_is_the_files(tmp_path: Path, group: Group) -> None:
    make_checkpoint(tmp_path, vocab_size=321)
    load(tmp_path, group)


def test_a_tied_model_that_was_saved_with_its_head_is_tied(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    ids = torch.randn(2, 64)
    expected = load(tmp_path).logits(ids)
    change_tensors(tmp_path, lm_head__weight=embedding.clone())
    assert torch.equal(load(tmp_path).logits(ids), expected)
    change_tensors(tmp_path, lm_head__weight=embedding[:-1].clone())
    with pytest.raises(ModelError, match=r"lm_head\.weight has the shape \[319, 64\]"):
        load(tmp_path)


def test_a_head_in_the_files_is_used_though_config_json_calls_it_tied(tmp_path: Path) -> None:
    """The result is the same as in transformers, which warns and does not tie the head to the embedding."""
    from transformers import LlamaForCausalLM

    make_checkpoint(tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).lm_head.weight.detach()
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(load(tmp_path).logits(hidden), hidden @ theirs.T)


@pytest.mark.parametrize(
    "spelling",
    [
        {
            "torch_dtype": "bfloat16",
            "dtype": None,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "rope_parameters": None,
        },
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None, "pretraining_tp": 2},
        {"num_key_value_heads": 2, "_name_or_path": "x", "_attn_implementation_autoset": True, "head_dim": None},
    ],
    ids=["version 4.31", "version 4.34", "version 4.48"],
)
def test_checkpoints_of_older_versions_of_transformers_are_loaded(model: Path, spelling: dict[str, Any]) -> None:
    change_config(model, **spelling)
    assert read_config(model).unknown_fields == ()
    load(model)


def test_checkpoints_of_the_present_transformers_are_read_without_a_warning(model: Path) -> None:
    assert read_config(model).unknown_fields == ()


# What the launcher reckons before a shard starts is what the shard has.
@pytest.mark.parametrize("numbers", [*Dtype, KvCacheDtype.int8, KvCacheDtype.fp8_e4m3fn])
@pytest.mark.parametrize("num_shard", [1, 2, 8])
def test_the_bytes_of_a_token_are_those_of_the_cache(num_shard: int, numbers: Dtype | KvCacheDtype) -> None:
    config = replace(read_config(demo_directory()), num_heads=8, num_kv_heads=4)
    split = split_model(config, 0, num_shard, config.vocab_size)
    stored = DTYPES[numbers] if isinstance(numbers, Dtype) else KV_TYPES[numbers]
    shapes = [KvShape(2 * len(split.kv_heads), config.head_size)] * config.num_layers
    assert slot_bytes(config, num_shard, numbers) == bytes_per_slot(shapes, stored)


def test_float16_is_computed_on_gpus_alone() -> None:
    assert choose_dtype(None, Dtype.float16, on_cpu=True) is Dtype.bfloat16
    assert choose_dtype(Dtype.float16, Dtype.float32, on_cpu=False) is Dtype.float16
    with pytest.raises(ModelError, match="--dtype float16 is not supported on CPUs"):
        choose_dtype(Dtype.float16, Dtype.float32, on_cpu=True)


def test_a_text_may_be_as_long_as_the_model_was_made_for() -> None:
    check_length(2048, 2048)
    with pytest.raises(ModelError, match=r"`max_total_tokens` must be <= 2048, .* Given: 2049"):
        check_length(2049, 2048)


def test_every_type_of_numbers_has_torch_s() -> None:
    assert {str(dtype).removeprefix("torch.") for dtype in DTYPES.values()} == {dtype.value for dtype in Dtype}
    assert all(DTYPES[dtype] is getattr(torch, dtype.value) for dtype in Dtype)


def test_bytes_are_counted_in_the_form_in_which_each_weight_is_kept(model: Path) -> None:
    config, files = read_config(model), SafetensorsFiles(model)
    tensors = {name: files.get(name).bfloat16() for name in files.names}
    assert weight_bytes(config, 2, lambda *_: None) == sum(tensor.nbytes for tensor in tensors.values())
    queries = {f"{config.names.layer(i).queries}.weight" for i in range(config.num_layers)}
    kept = 0
    for name, tensor in tensors.items():
        codes = int8(tensor) if name in queries else None
        kept += tensor.nbytes if codes is None else codes.q.nbytes + codes.groups.scales.nbytes

    def codes(layer: str, size: LinearSize) -> int | None:
        return int8_bytes(size.outputs, size.inputs) if f"{layer}.weight" in queries else None

    assert weight_bytes(config, 2, codes) == kept


def test_codes_may_lie_in_the_files_in_the_place_of_numbers(model: Path) -> None:
    """The tensors that a format has are checked like all others, and the layer's numbers belong to no such model."""

    def packed(layer: str, size: LinearSize) -> dict[str, tuple[int, ...]] | None:
        return {f"{layer}.codes": (size.outputs, size.inputs // 2)} if layer.endswith("q_proj") else None

    config, files = read_config(model), SafetensorsFiles(model)
    name = "model.layers.1.self_attn.q_proj"
    stored = {name: found for name in files.names if (found := files.describe(name)) is not None}
    for layer in ("model.layers.0", "model.layers.2", "model.layers.1"):
        with pytest.raises(ModelError, match=r"no tensor model.layers.\d.self_attn.q_proj.codes"):
            with_checked_tensors(config, stored, stored.get, packed)
        del stored[f"{layer}.self_attn.q_proj.weight"]
        stored[f"{layer}.self_attn.q_proj.codes"] = Stored("U8", (64, 32))
    with_checked_tensors(config, stored, stored.get, packed)
    with pytest.raises(ModelError, match=rf"{name}.codes has the shape \[64, 31\] in the weights files"):
        others = stored | {f"{name}.codes": Stored("U8", (64, 31))}
        with_checked_tensors(config, others, others.get, packed)
    with pytest.raises(ModelError, match=f"have a tensor {name}.weight, which"):
        others = stored | {f"{name}.weight": Stored("F32", (64, 64))}
        with_checked_tensors(config, others, others.get, packed)
