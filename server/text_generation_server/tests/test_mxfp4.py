"""Weights in MXFP4: their numbers, and the experts of gpt-oss in such files, whole and split over ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import make_family
from safetensors.torch import load_file, save_file
from shard_tools import CPU, generate, make_platform, random_ids, warm_runner
from torch import Tensor

from text_generation_common.errors import ModelError, WeightsError
from text_generation_common.models.config import read_config
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_server.distributed import Alone, Group
from text_generation_server.kernels.interface import ExpertWeights
from text_generation_server.models.experts import load_experts, unpack_mxfp4
from text_generation_server.models.loading import Loader
from text_generation_server.models.parts import Parts, split_model
from text_generation_server.weights.files import SafetensorsFiles

ANNOUNCED: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def e2m1(code: int) -> float:
    """The number of four bits: sign, two bits of exponent with bias 1, one bit of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -magnitude if code & 8 else magnitude


def exact_numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """float64"""
    of_code = torch.tensor([e2m1(code) for code in range(16)], dtype=torch.float64)
    numbers = torch.stack([of_code[blocks.long() & 15], of_code[blocks.long() >> 4]], dim=-1).flatten(-2)
    return (numbers * 2.0 ** (scales.double() - 127).unsqueeze(-1)).flatten(-2)


def random_codes(*shape: int, scales: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Blocks [*shape, 16] and scales [*shape]."""
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return blocks, torch.randint(*scales, shape, dtype=torch.uint8)


def test_numbers_are_exact_for_every_byte_and_every_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16).repeat(1, 255, 1)
    scales = torch.arange(255, dtype=torch.uint8).repeat(16, 1)
    assert torch.equal(unpack_mxfp4(blocks, scales), exact_numbers(blocks, scales).float())
    assert unpack_mxfp4(blocks[:, :1], torch.full((16, 1), 255, dtype=torch.uint8)).isnan().all()


def test_numbers_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = random_codes(2, 6, 3, scales=(100, 150))
    for dtype in (torch.float32, torch.bfloat16):
        theirs = convert_moe_packed_tensors(*codes, dtype=dtype).transpose(1, 2)
        assert torch.equal(unpack_mxfp4(*codes).to(dtype), theirs)


def make_packed(path: Path) -> torch.nn.Module:
    """Writes a tiny gpt-oss with experts in MXFP4, and returns transformers' model of the same numbers."""
    model = make_family(path, "gpt_oss")
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = random_codes(experts, outputs, inputs // 32, scales=(121, 125))
        tensors |= dict(zip((f"{name}_blocks", f"{name}_scales"), codes, strict=True))
        model.get_parameter(name).data.copy_(exact_numbers(*codes).transpose(1, 2))
    save_file(tensors, path / "model.safetensors")
    change_config(path, ANNOUNCED)
    return model


def change_config(path: Path, changes: dict[str, Any]) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("packed")
    return path, make_packed(path)


def test_a_model_with_packed_experts_computes_what_transformers_computes(packed: tuple[Path, torch.nn.Module]) -> None:
    path, model = packed
    runner = warm_runner(path)
    for length in (1, 70):
        client = generate(runner, random_ids(length), 8)
        ids = torch.cat([random_ids(length), torch.tensor(client.tokens[7])])
        with torch.no_grad():
            expected = model(ids.unsqueeze(0)).logits[0, length - 1 : -1].log_softmax(dim=-1)
        ours = expected.gather(1, ids[length:].unsqueeze(1)).squeeze(1)
        assert (expected.max(dim=1).values - ours).max() <= 1e-4
        torch.testing.assert_close(torch.tensor(client.logprobs[7]), ours, atol=1e-4, rtol=1e-4)


def experts_of_rank(path: Path, rank: int, size: int) -> ExpertWeights:
    files, group, config = SafetensorsFiles(path), Group(rank, size, Alone()), read_config(path)
    config = replace(config, names=config.names.as_in(lambda name: files.describe(name) is not None))
    assert config.moe is not None
    platform = make_platform(group=group)
    loader = Loader(files, platform, torch.float32, lambda: None)
    parts = Parts(config, split_model(config, rank, size, 320 // size), platform.kernels, loader, CPU, 64)
    return load_experts(parts, config.moe, config.names.layer(1), group)


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_ranks_that_end_within_a_block_are_the_whole(packed: tuple[Path, torch.nn.Module], size: int) -> None:
    whole = experts_of_rank(packed[0], 0, 1)
    ranks = [experts_of_rank(packed[0], rank, size) for rank in range(size)]
    downs = [exact_weight(rank.down) for rank in ranks]
    assert downs[0].shape[2] % 32
    assert torch.equal(torch.cat(downs, dim=2), exact_weight(whole.down))
    for of_whole, of_ranks in (
        (exact_weight(whole.gate_up), [exact_weight(rank.gate_up) for rank in ranks]),
        (whole.gate_up_bias, [rank.gate_up_bias for rank in ranks]),
    ):
        halves = [torch.cat([part.chunk(2, dim=1)[half] for part in of_ranks], dim=1) for half in (0, 1)]  # type: ignore[union-attr]
        assert of_whole is not None and torch.equal(torch.cat(halves, dim=1), of_whole)
    assert whole.down_bias is not None and ranks[0].down_bias is not None
    assert torch.equal(ranks[0].down_bias, whole.down_bias) and all(rank.down_bias is None for rank in ranks[1:])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "mixtral"}, "quantized as mxfp4, which is supported for model type gpt_oss only"),
        (
            {"quantization_config": {"quant_method": "aqlm"}},
            "the weights are quantized as aqlm, which is not supported",
        ),
    ],
)
def test_other_models_and_other_formats_are_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    make_packed(tmp_path)
    change_config(tmp_path, changes)
    with pytest.raises(ModelError, match=told):
        read_config(tmp_path)
    with pytest.raises(WeightsError, match="_blocks belongs to weights quantized as mxfp4"):
        SafetensorsFiles(tmp_path)


def test_blocks_of_another_type_than_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **ANNOUNCED}))
    save_file({"model.layers.0.mlp.experts.down_proj_blocks": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="_blocks belongs to weights quantized as mxfp4"):
        SafetensorsFiles(tmp_path)
