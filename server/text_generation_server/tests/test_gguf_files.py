"""GGUF files of every architecture, as llama.cpp's converter makes them, compared with transformers on the original."""

import json
from pathlib import Path

import pytest
import torch
from family_tools import ROUNDING, TOLERANCE, Made, teacher_forced, write_texts
from gguf_fixtures import FIXTURES, GOLDENS, make_gguf, make_original
from shard_tools import random_ids

from text_generation_common.gguf.config import ARCHITECTURES
from text_generation_common.models.families import FAMILIES

WRITTEN = json.loads(GOLDENS.read_text())
# Each of the converter's changes once. `-m slow` takes the others.
QUICK = ("bloom", "falcon, as 40B", "gemma3", "gpt2", "gpt_oss", "llama3", "phi3, longrope", "qwen2_moe")
# Models with logits up to 65: transformers' own in float32 are as far from those in float64 as ours.
LARGE = {"gpt_oss", "olmo3"}
WITHOUT_CONVERTER = {"gptj", "opt"}
NEW = 8
PROMPTS = (1, 17, 100)


@pytest.mark.parametrize(
    "fixture", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FIXTURES]
)
def test_a_file_of_llama_cpps_converter_computes_what_the_original_does(tmp_path: Path, fixture: str) -> None:
    original = make_original(tmp_path / "original", fixture)
    make_gguf(tmp_path / "model.gguf", tmp_path / "original", WRITTEN[fixture])
    (tmp_path / "model.gguf").chmod(0o400)
    made = Made(tmp_path / "model.gguf", original)
    worst = 0.0
    for text in write_texts(made.runner, [random_ids(length) for length in PROMPTS], NEW):
        expected = teacher_forced(original, text.prompt, text.tokens)
        chosen = expected.gather(1, torch.tensor(text.tokens).unsqueeze(1)).squeeze(1)
        assert (expected.max(dim=1).values - chosen).max() <= TOLERANCE
        worst = max(worst, (text.rows - expected).abs().max().item())
    assert worst <= (TOLERANCE if fixture in LARGE else ROUNDING)
    assert {path.name for path in tmp_path.iterdir()} == {"original", "model.gguf"}


def test_every_family_that_llama_cpp_converts_has_a_fixture() -> None:
    architectures = {golden["keys"]["general.architecture"][1] for golden in WRITTEN.values()}
    assert WRITTEN.keys() == FIXTURES.keys()
    assert architectures == ARCHITECTURES.keys()
    served = {row.model_type for row in ARCHITECTURES.values()} | {"mixtral", "olmo3"}
    assert served == FAMILIES.keys() - WITHOUT_CONVERTER
