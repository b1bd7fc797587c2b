"""LoRA adapters of models whose files have codes in the place of weights, whole and split over two ranks."""

import json
from pathlib import Path

import pytest
import torch
from adapter_tools import merged, sizes_of, texts_of, write_adapter
from collective_tasks import Ranks
from family_tools import teacher_forced
from gguf_fixtures import GOLDENS, make_gguf, make_original
from shard_tools import ALONE, make_checkpoint, random_ids
from torch import Tensor
from written_codes import quantize

from text_generation_common.models.config import read_config
from text_generation_common.models.quantized_layers import quantized_layers
from text_generation_common.models.tensors import linear_sizes
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_server.models.stored_codes import packed_layers
from text_generation_server.weights.gguf_files import open_files

PROMPT, NEW = random_ids(24), 6
WRITTEN = json.loads(GOLDENS.read_text())


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


def test_an_adapter_adds_to_the_products_of_a_gguf_file_of_q4_k_m(ranks: Ranks, tmp_path: Path) -> None:
    """The file's rows of queries and keys have another order than transformers'."""
    model = make_original(tmp_path / "original", "llama3")
    file = tmp_path / "model.gguf"
    make_gguf(file, tmp_path / "original", WRITTEN["llama3"], q4_k_m)
    config = read_config(file)
    files = open_files(file)
    layers = quantized_layers(file, files.describe)
    assert layers is not None
    packed = packed_layers(layers, files)
    for name in linear_sizes(config):
        weight = packed.weight(name)
        assert weight is not None
        model.get_submodule(name).weight.data = exact_weight(weight).float()
    adapter = write_adapter(tmp_path / "adapter", linear_sizes(config), 8, seed=1)
    adapted, plain = texts_of(ALONE, file, [adapter], PROMPT, NEW)
    for text, of in ((adapted, merged(model, tmp_path / "adapter", file)), (plain, model)):
        expected = teacher_forced(of, PROMPT, text.tokens)
        assert (text.logprobs - expected).abs().max() <= 1e-3
    first, _ = ranks.run(2, texts_of, file, [adapter], PROMPT, NEW)
    assert [text.tokens for text in first] == [adapted.tokens, plain.tokens]


def q4_k_m(name: str, tensor: Tensor) -> Tensor | tuple[str, list[int], bytes]:
    """Random blocks in the types that llama.cpp gives the linear layers in files of Q4_K_M."""
    if not name.startswith("blk.") or tensor.dim() < 2:
        return tensor
    draw = torch.Generator().manual_seed(len(name))
    blocks = tensor.numel() // 256

    def halves(*numbers: float) -> Tensor:
        return torch.tensor(numbers).half().view(torch.uint8).expand(blocks, -1)

    def any_bytes(count: int) -> Tensor:
        return torch.randint(0, 256, (blocks, count), generator=draw).to(torch.uint8)

    if "attn_v" in name or "ffn_down" in name:  # 6 bits, 16 scales of 8 bits, the scale of these
        kind, parts = "Q6_K", [any_bytes(192), any_bytes(16), halves(2e-5)]
    else:  # two scales, 8 scales and 8 minima of 6 bits, 4 bits
        kind, parts = "Q4_K", [halves(1e-4, 7.5e-4), any_bytes(12), any_bytes(128)]
    return kind, list(tensor.shape), torch.cat(parts, dim=1).numpy().tobytes()
