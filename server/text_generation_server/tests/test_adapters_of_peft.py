"""Adapters of every kind that PEFT writes: the text and the log-probabilities are those of PEFT's own forward."""

import json
from pathlib import Path

import pytest
import torch
from adapter_tools import runner_of, texts_of
from collective_tasks import Ranks
from peft_fixtures import CASES, GOLDENS, NEW, PICKED, PROMPT, make_base, write_golden_adapter
from safetensors.torch import load_file, save_file
from shard_tools import ALONE

from text_generation_common.adapters.listed import ListedAdapter
from text_generation_common.errors import ModelError

WRITTEN = json.loads(GOLDENS.read_text())
# A case for each way in which ranks hold parts of an adapter: linear layers, embedding and head, biases, experts.
SPLIT = (
    "llama, embedding and head", "llama, a bias for each pair", "gpt2, turned matrices", "granite, factors",
    "qwen3_moe, all experts and the router", "gpt_oss, gates and ups in turns",
)  # fmt: skip


def made(folder: Path, case: str) -> tuple[Path, ListedAdapter]:
    base = make_base(case)
    base.save_pretrained(folder / "base")
    write_golden_adapter(folder / "adapter", WRITTEN[case], base)
    return folder / "base", ListedAdapter("adapter", str(folder / "adapter"))


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_computes_what_peft_computes(tmp_path: Path, case: str) -> None:
    golden = WRITTEN[case]
    base, adapter = made(tmp_path, case)
    adapted, plain = texts_of(ALONE, base, [adapter], torch.tensor(PROMPT), NEW, compiled=True)
    expected = torch.tensor(golden["logprobs"])
    assert adapted.tokens == golden["tokens"]
    assert (adapted.logprobs[:, PICKED] - expected).abs().max() <= 1e-4
    assert (plain.logprobs[0] - adapted.logprobs[0]).abs().max() > 0.05


@pytest.mark.parametrize("case", SPLIT)
def test_two_ranks_compute_the_same_as_one(ranks: Ranks, tmp_path: Path, case: str) -> None:
    base, adapter = made(tmp_path, case)
    first, _ = ranks.run(2, texts_of, base, [adapter], torch.tensor(PROMPT), NEW)
    for text, whole in zip(first, texts_of(ALONE, base, [adapter], torch.tensor(PROMPT), NEW), strict=True):
        assert text.tokens == whole.tokens
        torch.testing.assert_close(text.logprobs, whole.logprobs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layer", ["model.embed_tokens", "lm_head"])
def test_an_adapter_that_was_trained_with_another_embedding_or_head_is_refused(tmp_path: Path, layer: str) -> None:
    base, adapter = made(tmp_path, "llama, embedding and head")
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.{layer}.base_layer.weight"][7, 3] += 1
    save_file(tensors, file)
    with pytest.raises(ModelError, match=f"{layer}.base_layer.weight is not the base's"):
        runner_of(base, [adapter])
