"""The shapes are those of the published models, and their Llamas read as many bytes."""

from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoConfig

from text_generation_benchmark.checkpoint import write_without_weights
from text_generation_benchmark.family_shapes import FAMILIES, llama_of, write_family
from text_generation_benchmark.roofline import weight_bytes
from text_generation_benchmark.shapes import END_OF_TEXT
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import shapes

# Bytes of all weights in bfloat16.
SIZES = {"Qwen3-0.6B": 1.192e9, "Gemma-3-1B": 2.0e9, "BLOOM-560m": 1.118e9, "Qwen3-MoE-0.9B": 1.815e9}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_llama_of_the_same_layers_has_as_many_bytes(name: str, tmp_path: Path) -> None:
    AutoConfig.for_model(**FAMILIES[name], tie_word_embeddings=True).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    weights = weight_bytes(config)
    assert weights == pytest.approx(SIZES[name], rel=0.005)
    write_without_weights(tmp_path / "llama", llama_of(config, weights))
    llama = read_config(tmp_path / "llama")
    assert llama.num_layers == config.num_layers and llama.vocab_size == config.vocab_size
    assert weight_bytes(llama) == pytest.approx(weights, rel=0.005)


def test_a_mixture_of_experts_has_a_third_of_its_weights_active(tmp_path: Path) -> None:
    fields = FAMILIES["Qwen3-MoE-0.9B"]
    AutoConfig.for_model(**fields, tie_word_embeddings=True).save_pretrained(tmp_path)
    assert weight_bytes(read_config(tmp_path), 8) == pytest.approx(0.61e9, rel=0.02)


def test_a_checkpoint_has_the_tensors_that_the_server_reads_and_no_early_end(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "n_layer": 1, "n_head": 4, "vocab_size": 2112}
    write_family(tmp_path, {"model_type": "bloom", **small})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        expected = shapes(read_config(tmp_path))
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == expected  # noqa: SIM118
        embedding = file.get_tensor("transformer.word_embeddings.weight")
    assert not embedding[END_OF_TEXT].any() and embedding[END_OF_TEXT + 1].any()
    assert (tmp_path / "tokenizer.json").exists()
