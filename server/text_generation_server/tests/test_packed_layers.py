"""Layers of which the files have codes, not numbers: joined, divided over ranks, multiplied by factors."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_tools import CPU, Client, generate, make_checkpoint, make_platform, random_ids
from torch import Tensor
from weight_forms import PACKED, random_weight

from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import LinearSize, linear_sizes
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.values import Dense, Weight
from text_generation_common.weights.headers import Stored
from text_generation_server.distributed import Alone, Group
from text_generation_server.kernels import reference, select_backend
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.programs import DecodePrograms
from text_generation_server.models import get_model
from text_generation_server.models.loading import Files, LayerPart, Loader, PackedLayers, stacked
from text_generation_server.runner import ModelRunner
from text_generation_server.sampling.sampler import Sampler
from text_generation_server.weights.files import SafetensorsFiles


@dataclass
class TensorsInMemory:
    tensors: Mapping[str, Tensor]
    bytes_read = 0

    @property
    def names(self) -> list[str]:
        return sorted(self.tensors)

    def describe(self, name: str) -> Stored | None:
        found = self.tensors.get(name)
        return None if found is None else Stored("F16" if found.dtype == torch.float16 else "F32", tuple(found.shape))

    def get(self, name: str) -> Tensor:
        return self.tensors[name]

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self.tensors[name].narrow(dim, start, stop - start)


@dataclass
class Layers:
    weights: Mapping[str, Weight]

    def tensors(self, layer: str, size: LinearSize) -> dict[str, tuple[int, ...]] | None:
        return {f"{layer}.codes": (size.outputs,)} if layer in self.weights else None

    def has(self, layer: str) -> bool:
        return layer in self.weights

    def weight(self, layer: str) -> Weight | None:
        return self.weights.get(layer)


def loaders(weights: Mapping[str, Weight], rank: int = 0, ranks: int = 1, **biases: Tensor) -> tuple[Loader, Loader]:
    """A loader of the weights in their forms, and a loader of the same weights as float32 numbers."""
    tensors = {f"{name}.bias": bias for name, bias in biases.items()}
    dense = {f"{name}.weight": exact_weight(weight) for name, weight in weights.items()}
    platform = make_platform(reference, Group(rank, ranks, Alone()))  # type: ignore[arg-type]
    packed = Loader(TensorsInMemory(tensors), platform, torch.float32, lambda: None, packed=Layers(weights))
    return packed, Loader(TensorsInMemory(tensors | dense), platform, torch.float32, lambda: None)


def inputs(count: int, size: int) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", PACKED)
def test_fused_layers_of_all_forms_are_those_of_the_numbers(form: str, gated: bool) -> None:
    """The second layer is of another form than the others, and some of its outputs are wanted, in another order."""
    forms = {"q": form, "k": "int8 zeros" if form != "int8 zeros" else "int4", "v": form}
    weights = {name: random_weight(its, 32, 64, 16, seed=1) for name, its in forms.items()}
    biases = {name: inputs(1, 32)[0] for name in forms}
    q, k, v = stacked(("q", 32, range(32)), ("k", 32, range(8, 24)), ("v", 32, range(4, 20)))
    parts = [q, LayerPart(k.name, k.rows, [3, 1, 0, 2], 4), v]
    packed, dense = (loader.fused(parts, True, gated=gated, multiple=32) for loader in loaders(weights, **biases))
    x = inputs(5, 64)
    torch.testing.assert_close(packed(x), dense(x), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_parts_of_ranks_add_up_to_the_layer(form: str, ranks: int) -> None:
    """Ranks cut groups of 32 inputs."""
    weight, x = random_weight(form, 24, 80, 32), inputs(4, 80)
    cuts = [round(80 * rank / ranks / 2) * 2 for rank in range(ranks + 1)]
    total = torch.zeros(4, 24)
    for rank, (start, end) in enumerate(pairwise(cuts)):
        packed, _ = loaders({"o": weight}, rank, ranks, o=torch.arange(24.0))
        missing = -(end - start) % 32
        part = packed.row_split("o", range(start, end), True, factor=0.75, multiple=32)
        total += part.part(torch.nn.functional.pad(x[:, start:end], (0, missing)))
    torch.testing.assert_close(total, 0.75 * (x @ exact_weight(weight).T + torch.arange(24.0)), atol=1e-3, rtol=1e-5)


def test_a_factor_does_not_change_the_scales_that_files_have() -> None:
    """0.3 times a scale in half precision would be another scale; 0.3 times the result is rounded once."""
    weight, x = random_weight("int8", 24, 64, 64), inputs(4, 64)
    packed, _ = loaders({"o": weight})
    y = packed.row_split("o", range(64), False, factor=0.3)(x)
    exact = 0.3 * (x.double() @ exact_weight(weight).double().T)
    torch.testing.assert_close(y.double(), exact, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("form", ["int4 zeros", "int8", "fp8"])
def test_a_model_of_codes_has_the_logits_of_the_numbers(tmp_path: Path, form: str) -> None:
    make_checkpoint(tmp_path)
    config, files = read_config(tmp_path), SafetensorsFiles(tmp_path)
    weights = {
        name: random_weight(form, size.outputs, size.inputs, 32, seed=number)
        for number, (name, size) in enumerate(linear_sizes(config).items())
    }
    others = {name: files.get(name) for name in files.names if name.removesuffix(".weight") not in weights}
    codes = {f"{name}.codes": torch.zeros(len(weight.q)) for name, weight in weights.items()}
    numbers = {f"{name}.weight": exact_weight(weight) for name, weight in weights.items()}
    ours = said(TensorsInMemory(others | codes), config, Layers(weights))
    exact = said(TensorsInMemory(others | numbers), config)
    assert ours.tokens == exact.tokens
    torch.testing.assert_close(torch.tensor(ours.logprobs[7]), torch.tensor(exact.logprobs[7]), atol=1e-3, rtol=1e-3)


def test_float16_is_kept_where_a_model_computes_in_bfloat16() -> None:
    half, x = inputs(24, 64).half(), inputs(4, 64).bfloat16()
    platform = make_platform(reference)  # type: ignore[arg-type]
    loader = Loader(TensorsInMemory({"o.weight": half}), platform, torch.bfloat16, lambda: None)
    (outputs,), (part, factor) = loader.outputs(stacked(("o", 24, range(24)))), loader.inputs("o", range(8, 40), 0.3)
    assert isinstance(outputs, Dense) and torch.equal(outputs.values, half) and factor == 0.3
    assert isinstance(part, Dense) and torch.equal(part.values, half[:, 8:40])
    y = loader.row_split("o", range(64), False, factor=0.3)(x)
    torch.testing.assert_close(y, (0.3 * (x.float() @ half.float().T)).bfloat16(), atol=0.0, rtol=2**-7)
    assert loader.rows("o.weight", range(24)).dtype == torch.bfloat16


def test_decode_steps_with_layers_in_every_form_are_recorded(tmp_path: Path) -> None:
    """Layers of one product have different forms, whose products write into one tensor."""
    kernels = select_backend(CPU).kernels
    if not isinstance(kernels, CpuKernels):
        pytest.skip("needs a C compiler (cc) when the package is installed")
    make_checkpoint(tmp_path)
    config, files = read_config(tmp_path), SafetensorsFiles(tmp_path)
    weights = {
        name: random_weight(PACKED[number % len(PACKED)], size.outputs, size.inputs, 32, seed=number)
        for number, (name, size) in enumerate(linear_sizes(config).items())
    }
    tensors = {name: files.get(name) for name in files.names if name.removesuffix(".weight") not in weights}
    tensors |= {f"{name}.codes": torch.zeros(len(weight.q)) for name, weight in weights.items()}
    tensors = {name: of.half() if "embed" in name or "head" in name else of for name, of in tensors.items()}
    programs = DecodePrograms(kernels.library, kernels.threads)
    of_bfloat16 = (TensorsInMemory(tensors), config, Layers(weights), torch.bfloat16)
    recorded, called = said(*of_bfloat16, kernels=kernels, graphs=programs), said(*of_bfloat16)
    assert set(programs._programs) == {1}
    assert (recorded.tokens, recorded.logprobs) == (called.tokens, called.logprobs)


def said(
    files: Files,
    config: ModelConfig,
    packed: PackedLayers | None = None,
    dtype: torch.dtype = torch.float32,
    **recording: Any,
) -> Client:
    platform = make_platform(**recording)
    model = get_model(files, config, platform, dtype, 512, lambda: None, packed=packed)
    runner = ModelRunner(model, platform, Sampler(platform.kernels, 0.5, 2.0), lambda: None, None)
    runner.warmup(512, None, 16, None)
    return generate(runner, random_ids(40), 8)
