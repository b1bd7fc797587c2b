"""Prompts and checkpoints: every server gets prompts with the same number of tokens, and no prompt twice."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from text_generation_benchmark.checkpoint import with_fillers, write_checkpoint
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.shapes import END_OF_TEXT, SHAPES, LlamaShape
from text_generation_common.model_files import demo_directory

DEMO_MODEL = demo_directory()
TINY = LlamaShape(hidden=16, intermediate=24, layers=1, heads=2, kv_heads=1, vocabulary=2100)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_checkpoint(folder, TINY)
    return folder


def test_prompts_have_exactly_the_tokens_asked_for_and_differ_from_their_first_words_on() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    prompts = Prompts(DEMO_MODEL)
    texts = prompts.make(32, 256) + prompts.make(32, 256)
    assert {len(tokenizer.encode(text).ids) for text in texts} == {256}
    assert len({text[:40] for text in texts}) == 64


def test_every_server_gets_the_same_prompts() -> None:
    assert Prompts(DEMO_MODEL).make(3, 20) == Prompts(DEMO_MODEL).make(3, 20)


def test_every_id_of_a_checkpoint_has_a_text_and_no_text_becomes_a_filler(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == TINY.vocabulary
    assert tokenizer.decode([2050]) == " filler2050"
    demo = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    text = " filler2050 and a fox with 17 lamps"
    assert tokenizer.encode(text).ids == demo.encode(text).ids


def test_a_vocabulary_that_is_full_stays_as_it_is() -> None:
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    assert with_fillers(tokenizer, len(tokenizer["model"]["vocab"])) == tokenizer


def test_the_end_of_the_text_is_never_the_best_token(tiny: Path) -> None:
    embedding = load_file(tiny / "model.safetensors")["model.embed_tokens.weight"].float()
    logits = torch.randn(200, TINY.hidden, generator=torch.Generator().manual_seed(1)) @ embedding.T
    assert not (logits.argmax(-1) == END_OF_TEXT).any()


def test_the_named_shapes_have_their_number_of_parameters() -> None:
    def parameters(shape: LlamaShape) -> int:
        head_size = shape.hidden // shape.heads
        attention = 2 * shape.hidden**2 + 2 * shape.hidden * shape.kv_heads * head_size
        return shape.vocabulary * shape.hidden + shape.layers * (attention + 3 * shape.hidden * shape.intermediate)

    expected = {"m100": 100, "m1b": 1039, "m3b": 3213}
    assert {name: round(parameters(shape) / 1e6) for name, shape in SHAPES.items()} == expected
