"""LoRA adapters of models whose files have codes in the place of weights, whole and split over two ranks."""

import json
from pathlib import Path

import pytest
import torch
from adapter_tools import merged, sizes_of, texts_of, write_adapter
from collective_tasks import Ranks
from family_checkpoints import make_family
from family_tools import teacher_forced
from gguf_fixtures import GOLDENS, as_numbers, draw_tensors, make_original, write_drawn
from shard_tools import ALONE, make_checkpoint, random_ids
from written_codes import quantize

# A form for each family: experts that one kernel multiplies, and one whose experts are computed one by one everywhere.
EXPERTS = {"mixtral": "awq", "qwen3_moe": "fp8 blocks", "qwen2_moe": "gptq act-order"}
PROMPT, NEW = random_ids(24), 6


@pytest.mark.parametrize("form", ["gptq 4 bits", "gptq act-order", "awq", "nf4", "packed with zeros"])
def test_an_adapter_adds_to_the_products_of_codes(ranks: Ranks, tmp_path: Path, form: str) -> None:
    model = make_checkpoint(tmp_path / "dense", initializer_range=0.1, num_hidden_layers=2)
    model.load_state_dict(
        quantize(tmp_path / "dense", form, packed := tmp_path / "packed", exact := tmp_path / "exact")
    )
    adapter = write_adapter(tmp_path / "adapter", sizes_of(exact), 8, seed=1)
    adapted, plain = texts_of(ALONE, packed, [adapter], PROMPT, NEW)
    for text, of in ((adapted, merged(model, tmp_path / "adapter", exact)), (plain, model)):
        expected = teacher_forced(of, PROMPT, text.tokens)
        assert text.tokens == expected.argmax(-1).tolist()
        assert (text.logprobs - expected).abs().max() <= 1e-4
    if form != "packed with zeros":  # parts of its layers would begin within a word
        first, _ = ranks.run(2, texts_of, packed, [adapter], PROMPT, NEW)
        assert [text.tokens for text in first] == [adapted.tokens, plain.tokens]
        torch.testing.assert_close(first[0].logprobs, adapted.logprobs, atol=1e-4, rtol=1e-5)


def test_an_adapter_adds_to_the_products_of_a_gguf_file_s_blocks(tmp_path: Path) -> None:
    """Rows of q and k lie in another order in the file than in the adapter."""
    golden = json.loads(GOLDENS.read_text())["llama3"]
    drawn = draw_tensors(golden, ["Q4_K", "Q6_K", "Q8_0"])
    packed = write_drawn(tmp_path / "packed.gguf", golden["keys"], drawn)
    exact = write_drawn(tmp_path / "exact.gguf", golden["keys"], as_numbers(drawn))
    make_original(tmp_path / "original", "llama3")  # for the names of its layers
    adapter = write_adapter(tmp_path / "adapter", sizes_of(tmp_path / "original"), 8, seed=1)
    size = len(drawn["token_embd.weight"][1])
    texts, expected = (texts_of(ALONE, path, [adapter], PROMPT, NEW, True, size) for path in (packed, exact))
    for text, of in zip(texts, expected, strict=True):
        assert text.tokens == of.tokens
        assert (text.logprobs - of.logprobs).abs().max() <= 1e-4
    assert (texts[0].logprobs - texts[1].logprobs).abs().max() > 0.1, "the adapter adds nothing"


@pytest.mark.parametrize(("family", "form"), EXPERTS.items())
def test_an_adapter_adds_to_the_products_of_experts_of_codes(
    ranks: Ranks, tmp_path: Path, family: str, form: str
) -> None:
    from transformers import AutoModelForCausalLM

    (dense := tmp_path / "dense").mkdir()
    make_family(dense, family, calm=True)
    quantize(dense, form, packed := tmp_path / "packed", exact := tmp_path / "exact")
    base = AutoModelForCausalLM.from_pretrained(exact, attn_implementation="eager").eval()
    adapter = write_adapter(tmp_path / "adapter", sizes_of(exact), 4, seed=1)
    model = merged(base, tmp_path / "adapter", exact)
    whole = [texts_of(ALONE, packed, [adapter], PROMPT, NEW, compiled)[0] for compiled in (True, False)]
    for text in whole:
        expected = teacher_forced(model, PROMPT, text.tokens)
        assert text.tokens == expected.argmax(-1).tolist()
        assert (text.logprobs - expected).abs().max() <= 1e-4
    first, _ = ranks.run(2, texts_of, packed, [adapter], PROMPT, NEW, True)
    assert first[0].tokens == whole[0].tokens
    torch.testing.assert_close(first[0].logprobs, whole[0].logprobs, atol=1e-4, rtol=1e-5)
