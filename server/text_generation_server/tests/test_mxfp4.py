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
from text_generation_common.models.quantized_layers import quantized_layers
from text_generation_common.models.tensors import LinearSize, matrix_sizes
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_server.distributed import Alone, Group
from text_generation_server.kernels import reference, select_backend
from text_generation_server.kernels.cpu import CpuKernels
from text_generation_server.kernels.cpu.programs import DecodePrograms
from text_generation_server.kernels.interface import ExpertWeights
from text_generation_server.models.experts import load_experts
from text_generation_server.models.loading import Loader
from text_generation_server.models.parts import Parts, split_model
from text_generation_server.models.stored_codes import StoredCodes
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


@pytest.mark.parametrize("backend", ["compiled", "reference"])
def test_a_model_with_packed_experts_computes_what_transformers_computes(
    packed: tuple[Path, torch.nn.Module], backend: str
) -> None:
    """Compiled kernels multiply by codes; others make numbers of them while they are loaded."""
    path, model = packed
    kernels = select_backend(CPU).kernels
    if backend == "reference":
        runner = warm_runner(path, kernels=reference)
    elif isinstance(kernels, CpuKernels):
        runner = warm_runner(path, kernels=kernels)
    else:
        pytest.skip("needs a C compiler (cc) when the package is installed")
    for length in (1, 70):
        client = generate(runner, random_ids(length), 8)
        ids = torch.cat([random_ids(length), torch.tensor(client.tokens[7])])
        with torch.no_grad():
            expected = model(ids.unsqueeze(0)).logits[0, length - 1 : -1].log_softmax(dim=-1)
        ours = expected.gather(1, ids[length:].unsqueeze(1)).squeeze(1)
        assert (expected.max(dim=1).values - ours).max() <= 1e-4
        torch.testing.assert_close(torch.tensor(client.logprobs[7]), ours, atol=1e-4, rtol=1e-4)


def test_decode_steps_with_packed_experts_are_recorded(packed: tuple[Path, torch.nn.Module]) -> None:
    kernels = select_backend(CPU).kernels
    if not isinstance(kernels, CpuKernels) or not kernels.library.has("gemm"):
        pytest.skip("needs compiled products of bfloat16")
    programs = DecodePrograms(kernels.library, kernels.threads)
    recorded, called = (
        generate(warm_runner(packed[0], dtype=torch.bfloat16, kernels=kernels, **graphs), random_ids(9), 4)
        for graphs in ({"graphs": programs}, {})
    )
    assert set(programs._programs) == {1}
    assert (recorded.tokens, recorded.logprobs) == (called.tokens, called.logprobs)


def experts_of_rank(path: Path, rank: int, size: int) -> ExpertWeights:
    files, group, config = SafetensorsFiles(path), Group(rank, size, Alone()), read_config(path)
    config = replace(config, names=config.names.as_in(lambda name: files.describe(name) is not None))
    assert config.moe is not None
    platform = make_platform(group=group)
    layers = quantized_layers(path, files.describe)
    assert layers is not None
    packed = StoredCodes(layers, files)
    for name, of_layer in matrix_sizes(config).items():
        packed.tensors(name, of_layer)
    loader = Loader(files, platform, torch.float32, lambda: None, packed=packed)
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
    layers = quantized_layers(tmp_path, SafetensorsFiles(tmp_path).describe)
    assert layers is not None
    with pytest.raises(WeightsError, match="down_proj_blocks is stored as F32, which mxfp4 does not have there"):
        layers.tensors("model.layers.0.mlp.experts.down_proj", LinearSize(64, 32, experts=2))
