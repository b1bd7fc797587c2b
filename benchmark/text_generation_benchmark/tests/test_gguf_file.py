"""A GGUF file holds the same model as its checkpoint: names, bits, the tokenizer, and the rows of rotary heads in
another order."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.family_shapes import write_family
from text_generation_benchmark.shapes import LlamaShape
from text_generation_common.model_files import demo_directory

DEMO_MODEL = demo_directory()
TINY = LlamaShape(hidden=16, intermediate=24, layers=2, heads=2, kv_heads=1, vocabulary=2050)


class FakeWriter:
    """Records the calls that it receives."""

    def __init__(self, path: str, architecture: str) -> None:
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}
        WRITERS.append(self)

    def add_tensor(self, name: str, tensor: np.ndarray[Any, Any], raw_dtype: str = "F32") -> None:
        self.tensors[name] = tensor

    def __getattr__(self, name: str) -> Any:
        return lambda *value: self.values.update({name: value[0] if value else None})


WRITERS: list[FakeWriter] = []
FAKE_GGUF = SimpleNamespace(
    GGUFWriter=FakeWriter,
    GGMLQuantizationType=SimpleNamespace(BF16="BF16"),
    LlamaFileType=SimpleNamespace(MOSTLY_BF16="BF16"),
    TokenType=SimpleNamespace(NORMAL="normal", CONTROL="control"),
)


@pytest.fixture
def gguf_file(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which otherwise runs where `gguf` is installed."""
    monkeypatch.setitem(sys.modules, "gguf", FAKE_GGUF)
    return importlib.import_module("text_generation_benchmark.peers.gguf_file")


def write(gguf_file: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWriter:
    monkeypatch.setattr(sys, "argv", ["gguf_file.py", str(model), "out.gguf"])
    gguf_file.main()
    return WRITERS[-1]


def rotated(x_HD: np.ndarray[Any, Any], pairs: list[tuple[int, int]], position: int) -> np.ndarray[Any, Any]:
    out = x_HD.copy()
    for i, (a, b) in enumerate(pairs):
        angle = position / 10 ** (i / 2)
        out[:, a] = x_HD[:, a] * np.cos(angle) - x_HD[:, b] * np.sin(angle)
        out[:, b] = x_HD[:, a] * np.sin(angle) + x_HD[:, b] * np.cos(angle)
    return out


def test_rows_in_pairs_give_the_scores_of_rows_in_halves(gguf_file: ModuleType) -> None:
    heads, size = 2, 8
    rng = np.random.default_rng(0)
    weights, x = rng.normal(size=(2, heads * size, 5)), rng.normal(size=5)
    halves, neighbours = [(i, i + 4) for i in range(4)], [(2 * i, 2 * i + 1) for i in range(4)]
    q, k = ((weight @ x).reshape(heads, size) for weight in weights)
    q2, k2 = ((gguf_file.interleaved(weight, heads) @ x).reshape(heads, size) for weight in weights)
    scores = (rotated(q, halves, 3) * rotated(k, halves, 1)).sum(-1)
    assert np.allclose((rotated(q2, neighbours, 3) * rotated(k2, neighbours, 1)).sum(-1), scores)
    assert not np.allclose((rotated(q, neighbours, 3) * rotated(k, neighbours, 1)).sum(-1), scores)


def test_every_weight_is_written_once_with_its_bits(
    gguf_file: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "tiny", TINY)
    writer = write(gguf_file, tmp_path / "tiny", monkeypatch)
    tensors = load_file(tmp_path / "tiny" / "model.safetensors")
    assert len(writer.tensors) == len(tensors) == 2 + TINY.layers * 9
    bits = tensors["model.layers.1.mlp.down_proj.weight"].view(torch.uint16).numpy()
    assert np.array_equal(writer.tensors["blk.1.ffn_down.weight"], bits)
    # the weights are all ones, in float32 and in bfloat16
    assert writer.tensors["output_norm.weight"].dtype == np.float32
    assert (writer.tensors["output_norm.weight"] == 1).all()


def test_the_tokenizer_keeps_its_ids_and_marks_what_is_not_text(
    gguf_file: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "tiny", TINY)
    values = write(gguf_file, tmp_path / "tiny", monkeypatch).values
    tokens, kinds = values["add_token_list"], values["add_token_types"]
    assert len(tokens) == len(kinds) == TINY.vocabulary
    assert (tokens[1], kinds[1], tokens[2049], kinds[2049]) == ("<s>", "control", "Ġfiller2049", "normal")
    assert values["add_add_bos_token"] is True


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.sinks", "model.layers.0.mlp.experts.weight"])
def test_a_weight_of_another_model_is_refused_by_name(gguf_file: ModuleType, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        gguf_file.ARCHITECTURES["llama"].gguf_name(name)


def test_queries_keys_and_values_of_each_head_are_taken_apart(gguf_file: ModuleType) -> None:
    fused = np.array([[10 * head + which] for head in range(2) for which in (1, 1, 2, 2, 3, 3)])
    assert gguf_file.apart(fused, 2).flatten().tolist() == [1, 1, 11, 11, 2, 2, 12, 12, 3, 3, 13, 13]


def test_experts_are_stacked_in_their_order(gguf_file: ModuleType, tmp_path: Path) -> None:
    name = "model.layers.3.mlp.experts.{}.down_proj.weight"
    save_file({name.format(i): torch.full((2, 3), i, dtype=torch.bfloat16) for i in range(11)}, tmp_path / "m")
    ((stacked, bits),) = gguf_file.read_stacked(tmp_path / "m")
    assert gguf_file.ARCHITECTURES["qwen3_moe"].gguf_name(stacked) == "blk.3.ffn_down_exps.weight"
    assert bits.shape == (11, 2, 3)
    assert (bits[:, 0, 0].astype(np.uint32) << 16).view(np.float32).tolist() == list(range(11))


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16}


def test_gemmas_norms_become_whole_weights(
    gguf_file: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_family(tmp_path, {"model_type": "gemma3_text", "num_key_value_heads": 1, "vocab_size": 2112, **SMALL})
    writer = write(gguf_file, tmp_path, monkeypatch)
    norms = [tensor for name, tensor in writer.tensors.items() if name.endswith("norm.weight")]
    assert len(norms) == 7 and all((norm == 1).all() for norm in norms)  # zeros in the checkpoint
    assert len(writer.tensors) == 7 + 8
    assert writer.values["add_rope_freq_base"] == 1e6 and writer.values["add_key_length"] == 16


def test_a_model_type_without_a_row_is_refused(gguf_file: ModuleType) -> None:
    with pytest.raises(ValueError, match="mamba: only llama, qwen3, qwen3_moe, gemma3_text, bloom are written"):
        gguf_file.add_shape(FakeWriter("", ""), {"model_type": "mamba"})


def test_another_dtype_is_refused(gguf_file: ModuleType, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="w is F32"):
        list(gguf_file.read_tensors(tmp_path / "m.safetensors"))


def test_scaled_rotary_embeddings_are_refused(gguf_file: ModuleType) -> None:
    with pytest.raises(ValueError, match="without scaled rotary"):
        gguf_file.rope_theta({"rope_theta": 1e4, "rope_scaling": {"factor": 2.0}})
