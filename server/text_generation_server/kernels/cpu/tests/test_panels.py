"""Codes that are packed from where they lie in a file are, bit by bit, those of the tensors that they stand for."""

from collections.abc import Mapping

import pytest
import torch
from golden_layers import golden_cases
from shard_tools import usable_kernels

from text_generation_common.cpu_features import NEEDS
from text_generation_common.gguf.types import BY_NAME
from text_generation_common.quantized.tensors.blocks import READERS, read_blocks
from text_generation_common.quantized.tensors.splits import joined, on_outputs, on_tensors
from text_generation_common.quantized.tensors.stored import CodesInFile, converted
from text_generation_common.quantized.values import Weight
from text_generation_server.kernels.cpu.backend import CpuKernels

CASES = golden_cases()


@pytest.fixture(scope="module", params=NEEDS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return usable_kernels(request.param)


def of_blocks(kind: str, outputs: int) -> Weight:
    data = torch.randint(0, 120, (outputs, 3 * BY_NAME[kind].bytes), dtype=torch.uint8)
    return read_blocks(kind, data, "l")


def bytes_of(kernels: CpuKernels, weight: Weight, gated: bool) -> Mapping[str, object]:
    """What a product has in memory."""
    linear = kernels.linear(weight, None, gated=gated, x_type=torch.float32, y_type=torch.float32)
    found = {name: word for name, word in linear._fixed.items() if word is not None}  # type: ignore[attr-defined]
    return {
        n: w.flatten().view(torch.uint8).numpy().tobytes() if isinstance(w, torch.Tensor) else w
        for n, w in found.items()
    }


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", READERS)
def test_blocks_are_packed_from_the_file_as_from_tensors(kernels: CpuKernels, kind: str, gated: bool) -> None:
    (weight,) = joined([of_blocks(kind, 24), of_blocks(kind, 24)])
    assert bytes_of(kernels, weight, gated) == bytes_of(kernels, on_tensors(weight, converted), gated)


@pytest.mark.parametrize("name", CASES)
def test_layers_are_packed_from_the_file_as_from_tensors(kernels: CpuKernels, name: str) -> None:
    one = CASES[name].read()
    if one.q.dim() > 2:
        one = on_outputs(one, lambda numbers: numbers[0])
    (weight,) = joined([one, one])
    assert bytes_of(kernels, weight, False) == bytes_of(kernels, on_tensors(weight, converted), False)


def test_codes_of_most_formats_are_not_copied_before_they_are_packed() -> None:
    kept = [kind for kind in READERS if isinstance(joined([of_blocks(kind, 8)] * 2)[0].q, CodesInFile)]
    assert {*READERS} - {*kept} == {"Q3_K"}
