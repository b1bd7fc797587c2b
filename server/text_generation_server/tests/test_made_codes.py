"""Codes that are made while a model is loaded: for --quantize, --head-dtype, and --load-format dummy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import make_family
from safetensors.torch import load_file, save_file
from shard_tools import CPU, generate, make_checkpoint, make_platform, random_ids, warm_runner
from torch import Tensor

from text_generation_common.flags.kinds import HeadDtype
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import made_codes
from text_generation_common.quantized.announcement import announcement_of
from text_generation_common.quantized.methods import description_of
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.values import Dense
from text_generation_server.kernels import select_backend
from text_generation_server.kernels.cpu import CpuKernels
from text_generation_server.kernels.cpu.experts_of_codes import ExpertsOfCodes
from text_generation_server.layers.weights import HEAD_FORMATS, WeightFormat, fp8, int4, int8
from text_generation_server.models import get_model
from text_generation_server.models.loading import DummyFiles, Files
from text_generation_server.models.random_codes import RandomCodes
from text_generation_server.runner import ModelRunner
from text_generation_server.sampling.sampler import Sampler
from text_generation_server.weights.files import SafetensorsFiles


@pytest.mark.parametrize("inputs", [32, 40, 96])
def test_four_bits_err_by_half_a_step_of_their_group_at_most(inputs: int) -> None:
    weight = torch.randn(6, inputs)
    weight[2] = 0
    padded = torch.nn.functional.pad(weight, (0, -inputs % 32)).view(6, -1, 32)
    steps = (padded.abs().amax(2, keepdim=True) / 8).expand_as(padded).reshape(6, -1)[:, :inputs]
    errors = (exact_weight(int4(weight)) - weight).abs()
    # The largest number's opposite has no code: it errs by a step. Scales are rounded to float16.
    assert bool((errors <= steps * 1.002 + 1e-6).all()) and bool((errors <= steps * 0.51 + 1e-6).float().mean() > 0.95)
    assert exact_weight(int4(weight))[2].abs().max() == 0


def test_what_four_bits_hold_is_kept_and_an_odd_number_of_inputs_becomes_eight_bits() -> None:
    codes = torch.randint(-8, 8, (5, 64)).float()
    codes[:, ::32] = -8
    assert torch.equal(exact_weight(int4(codes * 0.25)), codes * 0.25)
    odd = torch.randn(4, 33)
    assert torch.equal(exact_weight(int4(odd)), exact_weight(int8(odd)))


def test_fp8_errs_by_a_sixteenth_at_most() -> None:
    weight = torch.randn(6, 40)
    errors = (exact_weight(fp8(weight)) - weight).abs()
    assert bool((errors <= weight.abs() / 16 + weight.abs().amax(1, keepdim=True) / 448 / 256).all())


def runner_of(path: Path, files: Files, codes: RandomCodes | None = None, head: HeadDtype | None = None) -> ModelRunner:
    platform = make_platform()
    format = None if head is None else HEAD_FORMATS[head]
    config = read_config(path)
    model = get_model(files, config, platform, torch.float32, 64, lambda: None, packed=codes, head_format=format)
    runner = ModelRunner(model, platform, Sampler(platform.kernels, 0.5, 2.0), lambda: None, None)
    runner.warmup(64, None, 4, None)
    return runner


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_copy_of_the_head_errs_as_its_type_does_and_the_embedding_stays(tmp_path: Path, is_tied: bool) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=is_tied)
    files, prompt = SafetensorsFiles(tmp_path), random_ids(12)
    whole = runner_of(tmp_path, files)
    errors = {}
    for head in HeadDtype:
        runner = runner_of(tmp_path, files, head=head)
        ids, hidden = torch.arange(8, dtype=torch.int32), torch.randn(3, 64)
        assert torch.equal(runner._model._embed(ids), whole._model._embed(ids))  # type: ignore[attr-defined]
        ours, theirs = (each._model._head(hidden) for each in (runner, whole))  # type: ignore[attr-defined]
        errors[head] = float((ours - theirs).norm() / theirs.norm())
        assert len(generate(runner, prompt, 3).tokens[7]) == 3
    assert errors["float32"] < 1e-6 < errors["bfloat16"] < 4e-3 and errors["int8"] < 0.012 < errors["int4"] < 0.12


def rounded(weight: Tensor, change: WeightFormat, turned: bool) -> Tensor:
    """A weight, or those of all experts, of numbers that the format holds exactly. `turned`: [inputs, outputs]."""
    if weight.dim() > 2:
        return torch.stack([rounded(each, change, turned) for each in weight])
    return rounded(weight.T, change, False).T.contiguous() if turned else exact_weight(change(weight)).to(weight.dtype)


def rounded_family(path: Path, family: str, change: WeightFormat, dtype: torch.dtype = torch.float32) -> None:
    make_family(path, family, calm=True)
    tensors = load_file(path / "model.safetensors")
    kept = ("embed_tokens", "lm_head", "router", "gate.weight", "norm", "bias", "sinks")
    for name in [name for name in tensors if not any(part in name for part in kept)]:
        tensors[name] = rounded(tensors[name], change, turned=tensors[name].dim() > 2 and family == "gpt_oss")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path / "model.safetensors")


def experts_of(runner: ModelRunner) -> Any:
    return runner._model._blocks[1]._mlp._compute  # type: ignore[attr-defined]


# Experts apart; gates and ups in one tensor, with a factor of downs; in turns and with biases.
FAMILIES = ["mixtral", "granitemoe", "gpt_oss"]


@pytest.fixture
def compiled() -> CpuKernels:
    if not isinstance(kernels := select_backend(CPU).kernels, CpuKernels):
        pytest.skip("needs a C compiler (cc) when the package is installed")
    return kernels


@pytest.mark.parametrize("change", [int8, int4])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_become_codes_however_they_lie_in_the_files(
    tmp_path: Path, compiled: CpuKernels, family: str, change: WeightFormat
) -> None:
    rounded_family(tmp_path, family, change)
    runner = warm_runner(tmp_path, kernels=compiled, weight_format=change)
    assert isinstance(experts_of(runner), ExpertsOfCodes)
    ours, exact = (generate(each, random_ids(20), 8) for each in (runner, warm_runner(tmp_path, kernels=compiled)))
    assert ours.tokens == exact.tokens
    torch.testing.assert_close(torch.tensor(ours.logprobs[7]), torch.tensor(exact.logprobs[7]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_float16_stay_so_where_a_model_computes_in_bfloat16(
    tmp_path: Path, compiled: CpuKernels, family: str
) -> None:
    rounded_family(tmp_path, family, lambda weight: Dense(weight.half()), torch.float16)
    experts = experts_of(warm_runner(tmp_path, kernels=compiled, dtype=torch.bfloat16))
    assert isinstance(experts, ExpertsOfCodes)
    codes = [linear._codes for products in (experts._up, experts._down) for linear in products._linears]
    assert {of.dtype for of in codes} == {torch.float16}


SETTINGS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_random_codes_of_every_form_are_served_and_are_the_same_each_time(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config, description = read_config(tmp_path), description_of(announcement_of(SETTINGS[name], "here"))

    def tokens() -> list[int]:
        codes = RandomCodes(made_codes(config), description, CPU)
        files = DummyFiles(config, CPU, torch.float32, codes)
        assert not any(name.endswith("q_proj.weight") for name in files.names)
        client = generate(runner_of(tmp_path, files, codes), random_ids(9), 4)
        assert bool(torch.tensor(client.logprobs[7]).isfinite().all())
        return client.tokens[7]

    assert tokens() == tokens()
    layer, codes = next(iter(made_codes(config).items())), RandomCodes(made_codes(config), description, CPU)
    codes.tensors(*layer)
    weight = codes.weight(layer[0])
    assert weight is not None and 0.01 < float(exact_weight(weight).std()) < 0.04
