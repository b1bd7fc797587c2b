"""Products of weights whose codes are in groups, for every processor that has a compiled library."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weight_forms import random_weight

from text_generation_common.cpu_features import NEEDS
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.tensors.splits import inputs_of
from text_generation_server.kernels.cpu import load_kernels
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.codes import CodesLinear
from text_generation_server.kernels.interface import HoldsRows, LinearKernel
from text_generation_server.layers.linear import make_linear

FORMS = ["int4", "int4 zeros", "int4 order", "int8", "int8 zeros"]
GUARD = 77.0


@pytest.fixture(params=NEEDS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    kernels = load_kernels(request.param)
    if kernels is None:
        pytest.skip(f"needs a processor with {request.param}, and a C compiler when the package is installed")
    return kernels


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def layer(kernels: CpuKernels, form: str, shape: tuple[int, int], size: int, **options: object) -> LinearKernel:
    """A layer of random codes with float32 results, in groups of `size` inputs."""
    weight = random_weight(form, *shape, size)
    made = make_linear(kernels, weight, x_type=torch.bfloat16, y_type=torch.float32, **options)  # type: ignore[arg-type]
    assert isinstance(made, CodesLinear)
    return made


# (outputs, inputs), and inputs of a group: two groups; a last group with fewer inputs; a group that goes on in the
# next part of the inputs; outputs that fill no panels.
SHAPES = [((64, 64), 32), ((96, 96), 36), ((32, 2112), 1056), ((32, 1152), 128), ((90, 128), 64)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("shape", "size"), SHAPES, ids=str)
def test_products_are_those_of_the_numbers(kernels: CpuKernels, form: str, shape: tuple[int, int], size: int) -> None:
    weight, bias = random_weight(form, *shape, size), random(shape[0])
    linear, exact = layer(kernels, form, shape, size, bias=bias), exact_weight(weight).double()
    for rows in (1, 2, 5, 7, 13, 40):
        x = random(rows, shape[1])
        expected = x.double() @ exact.T + bias.double()
        torch.testing.assert_close(linear(x).double(), expected, atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gates_addends_and_factors_are_applied_to_the_product(kernels: CpuKernels, form: str) -> None:
    weight, bias, x, addend = random_weight(form, 128, 96, 32), random(128), random(9, 96), random(9, 128)
    linear = layer(kernels, form, (128, 96), 32, bias=bias, gated=True, factor=0.25)
    gate, up = (0.25 * x.double() @ exact_weight(weight).double().T + bias + addend).chunk(2, dim=1)
    fused = torch.full((9, 70), GUARD)
    linear(x, out=fused[:, 3:67], addend=addend)
    torch.testing.assert_close(fused[:, 3:67].double(), F.silu(gate) * up, atol=1e-3, rtol=1e-4)
    assert bool((fused[:, :3] == GUARD).all()) and bool((fused[:, 67:] == GUARD).all())


@pytest.mark.parametrize("size", [32, 48])
def test_a_ranks_part_of_sorted_inputs_is_multiplied_as_codes(kernels: CpuKernels, size: int) -> None:
    weight, x = random_weight("int4 order", 64, 192, size), random(5, 96)
    linear = make_linear(kernels, inputs_of(weight, range(40, 136)), x_type=torch.bfloat16, y_type=torch.float32)
    expected = x.double() @ exact_weight(weight)[:, 40:136].double().T
    torch.testing.assert_close(linear(x).double(), expected, atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [32, 640])
def test_a_rows_bits_depend_on_no_other_row_and_on_no_thread(kernels: CpuKernels, form: str, size: int) -> None:
    kernels.threads = 1
    linear, x = layer(kernels, form, (64, 1280), size), random(100, 1280)
    whole = linear(x)
    for threads in (1, 3):
        kernels.threads = threads
        linear = layer(kernels, form, (64, 1280), size)
        for count in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 49, 97, 100):
            assert torch.equal(linear(x[:count]), whole[:count])
            assert torch.equal(linear(x[100 - count :]), whole[100 - count :])


def test_forms_without_a_product_are_left_to_torch(kernels: CpuKernels) -> None:
    for form, shape, size in (("int4 offsets", (32, 64), 32), ("table4", (32, 64), 32), ("int4", (32, 40), 8)):
        linear = make_linear(kernels, random_weight(form, *shape, size), x_type=torch.bfloat16)
        assert not isinstance(linear, CodesLinear) and linear(random(2, shape[1])).shape == (2, 32)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_an_embedding_are_read_from_the_panels(kernels: CpuKernels, form: str) -> None:
    weight = random_weight(form, 90, 128, 64)
    linear, ids = layer(kernels, form, (90, 128), 64), torch.tensor([89, 0, 16, 17, 0], dtype=torch.int32)
    assert isinstance(linear, HoldsRows) and linear.has_rows
    assert torch.equal(linear.rows(ids), exact_weight(weight)[ids])
