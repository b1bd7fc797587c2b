"""Products of packed weights equal torch's products, for every processor that has a compiled library."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_common.cpu_features import NEEDS
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.values import Dense, Int8, Weight
from text_generation_server.kernels import reference
from text_generation_server.kernels.cpu import load_kernels
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.codes import CodesLinear
from text_generation_server.kernels.cpu.linear import Float32Linear, PackedLinear, Scratch
from text_generation_server.kernels.interface import HoldsRows, LinearKernel
from text_generation_server.layers.linear import make_linear
from text_generation_server.layers.weights import WeightFormat, dense, int8

NAN = float("nan")
GUARD = 77.0
# Numbers of rows: a few rows, which use dot products, then one tile, two tiles and several tiles, each also with a
# remainder.
ROWS = [1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 64, 70]
# (inputs, outputs): one panel pair; a remainder of outputs; more inputs than outputs.
SHAPES = [(32, 32), (64, 90), (256, 48)]


@pytest.fixture(params=NEEDS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    kernels = load_kernels(request.param)
    if kernels is None or not kernels.library.has("gemm"):
        pytest.skip(f"needs an x86-64 processor for {request.param}, and a C compiler when the package is installed")
    return kernels


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def exact_values(weight: Weight) -> Tensor:
    """The exact numbers that a dense weight or one of 8 bits represents, in float64."""
    assert isinstance(weight, Dense | Int8)
    return weight.values.double() if isinstance(weight, Dense) else weight.q.double() * weight.groups.scales.double()


def linear_of(kernels: Any, weight: Weight, bias: Tensor | None = None, **options: Any) -> LinearKernel:
    """A layer of bfloat16 inputs."""
    return make_linear(kernels, weight, bias, x_type=torch.bfloat16, **options)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_products_are_those_of_the_weights(kernels: CpuKernels, inputs: int, outputs: int, with_bias: bool) -> None:
    weight, bias = random(outputs, inputs), random(outputs) if with_bias else None
    linear = make_linear(kernels, dense(weight), bias, y_type=torch.float32)
    assert isinstance(linear, PackedLinear)
    for rows in ROWS:
        x = random(rows, inputs)
        y = linear(x)
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), exact(x, weight, bias), atol=1e-4, rtol=1e-5)


def test_results_are_rounded_to_the_models_type(kernels: CpuKernels) -> None:
    weight, x = random(64, 64), random(20, 64)
    y, precise = make_linear(kernels, dense(weight))(x), make_linear(kernels, dense(weight), y_type=torch.float32)(x)
    assert torch.equal(y, precise.bfloat16())


def test_gates_and_ups_meet(kernels: CpuKernels) -> None:
    weight = random(2 * 96, 64)
    for rows in ROWS:
        x = random(rows, 64)
        gate, up = exact(x, weight, None).chunk(2, dim=1)
        y = make_linear(kernels, dense(weight), gated=True, y_type=torch.float32)(x)
        torch.testing.assert_close(y.double(), F.silu(gate) * up, atol=1e-3, rtol=1e-5)


def test_gates_that_are_closed_let_nothing_through(kernels: CpuKernels) -> None:
    weight = torch.cat([torch.eye(32), torch.eye(32)[31].expand(32, 32)]).bfloat16()
    x = torch.full((2, 32), 0.5).bfloat16()
    x[0, :8] = torch.tensor([-50.0, -89, -120, -177.5, -1e3, -1e4, -1e30, -3e38])
    gate, up = exact(x, weight, None).chunk(2, dim=1)
    y = make_linear(kernels, dense(weight), gated=True, y_type=torch.float32)(x)
    torch.testing.assert_close(y.double(), F.silu(gate) * up, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_8_bit_weights_are_multiplied_by_their_scales(kernels: CpuKernels, gated: bool) -> None:
    weight = random(2 * 48 if gated else 90, 64) * torch.rand(2 * 48 if gated else 90, 1).bfloat16()
    stored = exact_values(int8(weight))
    linear = linear_of(kernels, int8(weight), gated=gated, y_type=torch.float32)
    assert isinstance(linear, PackedLinear)
    for rows in ROWS:
        x = random(rows, 64)
        expected = exact(x, stored, None)
        if gated:
            gate, up = expected.chunk(2, dim=1)
            expected = F.silu(gate) * up
        torch.testing.assert_close(linear(x).double(), expected, atol=1e-3, rtol=1e-5)


class GuardedScratch(Scratch):
    """Scratch memory that is filled with NaN, exactly as large as necessary, and followed by a guard."""

    def reserve(self, count: int) -> None:
        self.memory = torch.full((count + 32 + 64,), NAN, dtype=torch.bfloat16)
        self.start = -self.memory.data_ptr() // 2 % 32  # a multiple of 64 bytes
        self.memory[self.start + count :] = GUARD
        self.count = count

    def data_ptr(self) -> int:
        return self.memory[self.start :].data_ptr()

    def is_whole(self) -> bool:
        return bool((self.memory[self.start + self.count :] == GUARD).all())


# Inputs in several parts, rows in several blocks, both, and remainders of inputs and rows.
@pytest.mark.parametrize(("inputs", "rows"), [(2080, 33), (2080, 600), (4128, 1200), (2048, 400), (768, 1100)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weight_format", [dense, int8])
def test_large_products_are_made_of_parts_that_add_up(
    kernels: CpuKernels,
    monkeypatch: pytest.MonkeyPatch,
    inputs: int,
    rows: int,
    gated: bool,
    weight_format: WeightFormat,
) -> None:
    scratch = GuardedScratch()
    monkeypatch.setattr(kernels, "_scratch", scratch)
    weight, x = random(128, inputs) * 0.1, random(rows, inputs)
    kept = weight_format(weight)
    stored = exact_values(kept)
    linear = linear_of(kernels, kept, gated=gated, y_type=torch.float32)
    y, expected = linear(x), exact(x, stored, None)
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    torch.testing.assert_close(y.double(), expected, atol=2e-3, rtol=1e-4)
    assert scratch.is_whole()
    assert torch.equal(linear(x[:17]), y[:17])


def test_8_bits_round_to_the_nearest_of_255_steps() -> None:
    weight = torch.tensor([[127.0, 1.5, -0.49], [0.0, 0.0, 0.0], [-2.0, 1.0, 0.5]])
    kept = int8(weight)
    scales = kept.groups.scales
    assert kept.q.tolist() == [[127, 2, 0], [0, 0, 0], [-127, 64, 32]]
    assert scales[0] == 1 and scales[2] == pytest.approx(2 / 127)


@pytest.mark.parametrize("weight_format", [dense, int8])
def test_a_rows_result_does_not_depend_on_its_neighbours(kernels: CpuKernels, weight_format: WeightFormat) -> None:
    """With a matrix unit, products of up to 4 rows use other instructions than products of more rows."""
    x = random(200, 2080)
    linear = linear_of(kernels, weight_format(random(64, 2080)), y_type=torch.float32)
    groups = [[1, 2, 3, 4], [5, 16, 17, 33, 200]]
    if kernels.library.target != "amx":
        groups = [[1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 23, 24, 25, 31, 33, 63, 97, 200]]
    for rows in groups:
        whole = linear(x[: rows[-1]])
        for count in rows:
            assert torch.equal(linear(x[:count]), whole[:count])
            assert torch.equal(linear(x[rows[-1] - count : rows[-1]]), whole[rows[-1] - count :])


@pytest.fixture(params=NEEDS)
def exact_kernels(request: pytest.FixtureRequest) -> CpuKernels:
    kernels = load_kernels(request.param)
    if kernels is None:
        pytest.skip(f"needs a C compiler when the package is installed, and of the processor: {NEEDS[request.param]}")
    return kernels


# (inputs, outputs): outputs that fill panels and that do not; inputs in one block of 512 and in several blocks.
FLOAT_SHAPES = [(1, 1), (40, 33), (64, 128), (512, 47), (513, 96), (1100, 65)]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), FLOAT_SHAPES)
def test_float32_products_are_those_of_the_weights(
    exact_kernels: CpuKernels, inputs: int, outputs: int, with_bias: bool
) -> None:
    weight, bias = random(outputs, inputs).float(), random(outputs).float() if with_bias else None
    linear = make_linear(exact_kernels, dense(weight), bias)
    assert isinstance(linear, Float32Linear)
    for rows in ROWS:
        x = random(rows, inputs).float()
        torch.testing.assert_close(linear(x).double(), exact(x, weight, bias), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [64, 90])
def test_rows_of_the_weight_can_be_read_from_its_panels(
    exact_kernels: CpuKernels, outputs: int, dtype: torch.dtype
) -> None:
    weight = random(outputs, 96).to(dtype)
    linear = make_linear(exact_kernels, dense(weight), y_type=torch.float32)
    if not isinstance(linear, HoldsRows):
        assert dtype == torch.bfloat16 and not exact_kernels.library.has("gemm")
        return
    ids = torch.tensor([0, 15, 16, 17, 31, 32, 33, outputs - 1, 7, 7], dtype=torch.int32)
    assert linear.has_rows and torch.equal(linear.rows(ids), weight[ids])


def test_weights_in_another_order_hold_no_rows_and_codes_hold_their_numbers(kernels: CpuKernels) -> None:
    weight, ids = int8(random(64, 64)), torch.tensor([0, 15, 16, 63, 17], dtype=torch.int32)
    for gated in (dense(random(64, 64)), weight):
        linear = linear_of(kernels, gated, gated=True)
        assert isinstance(linear, HoldsRows) and not linear.has_rows
    linear = linear_of(kernels, weight)
    assert isinstance(linear, HoldsRows) and linear.has_rows
    assert torch.equal(linear.rows(ids), exact_weight(weight)[ids].bfloat16())


def test_float32_gates_and_ups_meet(exact_kernels: CpuKernels) -> None:
    weight, x = random(2 * 48, 40).float(), random(5, 40).float()
    gate, up = exact(x, weight, None).chunk(2, dim=1)
    y = make_linear(exact_kernels, dense(weight), gated=True)(x)
    torch.testing.assert_close(y.double(), F.silu(gate) * up, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("inputs", "outputs"), FLOAT_SHAPES)
def test_a_float32_row_is_the_same_to_the_bit_whatever_the_other_rows_are(
    exact_kernels: CpuKernels, inputs: int, outputs: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight, x = (torch.randn(shape, generator=generator) for shape in ((outputs, inputs), (70, inputs)))
    exact_kernels.threads = 1
    whole = make_linear(exact_kernels, dense(weight))(x)
    exact_kernels.threads = threads
    linear = make_linear(exact_kernels, dense(weight))
    for count in range(1, 20):
        assert torch.equal(linear(x[:count]), whole[:count])
        assert torch.equal(linear(x[70 - count :]), whole[70 - count :])
    order = torch.randperm(70, generator=generator)
    assert torch.equal(linear(x[order]), whole[order])


def test_without_kernels_for_it_8_bits_are_the_same_numbers() -> None:
    weight, bias, x = random(24, 40), random(24), random(5, 40)
    kept = int8(weight)
    y = linear_of(reference, kept, bias)(x)
    expected = exact(x, exact_values(kept), bias)
    torch.testing.assert_close(y.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("target", ["reference", *NEEDS])
@pytest.mark.parametrize("size", [2.0**-12, 2.0**-14, 2.0**-16], ids=["large", "middle", "small"])
def test_a_long_gated_product_of_8_bits_is_rounded_twice_at_most(target: str, size: float) -> None:
    """bfloat16 keeps 8 bits, so rounding changes a number by at most 2^-8 of it. A kernel may round the sums (of the
    gate and of the up), and then rounds the result y = silu(gate) * up.

    All numbers are whole multiples of `size` that float32 can hold, so sums are exact in any order. The error of a gate
    is multiplied by the slope of silu.
    """
    kernels = reference if target == "reference" else load_kernels(target)
    if kernels is None:
        pytest.skip(f"needs a processor with {target}, and a C compiler when the package is installed")
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (8, 4096), generator=generator).bfloat16()
    numbers = torch.randint(-127, 128, (1024, 4096), generator=generator).double()
    numbers[:, 0] = 127  # makes the scale equal to `size`
    gate, up = exact(x, numbers * size, None).chunk(2, dim=1)
    share = torch.sigmoid(gate)
    expected, slope = gate * share * up, gate * (share + gate * share * (1 - share)) * up
    limit = (slope.abs() + 2 * expected.abs()) * 2**-8 * 1.01 + 1e-6
    linear = linear_of(kernels, int8((numbers * size).bfloat16()), gated=True)
    difference = (linear(x).double() - expected).abs()
    assert bool((difference <= limit).all()), float((difference / limit).max())


def test_shapes_that_fill_no_panels_and_wider_numbers_get_another_product(kernels: CpuKernels) -> None:
    for weight, gated in ((random(32, 40), False), (random(2 * 40, 32), True), (random(32, 32).float(), False)):
        x = random(3, weight.shape[1])
        linear = linear_of(kernels, dense(weight), gated=gated, y_type=torch.float32)
        gate, up = exact(x, weight, None).chunk(2, dim=1)
        expected = F.silu(gate) * up if gated else exact(x, weight, None)
        assert isinstance(linear, CodesLinear)
        torch.testing.assert_close(linear(x).double(), expected, atol=1e-3, rtol=1e-5)


BACKENDS = ["reference", *NEEDS]
FORMS: list[tuple[torch.dtype, WeightFormat]] = [
    (torch.float32, dense),
    (torch.bfloat16, dense),
    (torch.bfloat16, int8),
]


def backend(name: str) -> Any:
    if (kernels := reference if name == "reference" else load_kernels(name)) is None:
        pytest.skip(f"needs a processor with {name}, and a C compiler when the package is installed")
    return kernels


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("x_type", "weight_format"), FORMS)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_products_write_into_columns_of_one_tensor(
    name: str, x_type: torch.dtype, weight_format: WeightFormat, rows: int
) -> None:
    """In these columns are the bits that each product has alone, and all other columns stay."""
    kernels, x = backend(name), random(rows, 64).to(x_type)
    linears = [
        make_linear(kernels, weight_format(random(outputs, 64).to(x_type)), x_type=x_type) for outputs in (90, 32, 5)
    ]
    fused = torch.full((rows, 160), GUARD, dtype=x_type)
    for linear, columns in zip(linears, (range(1, 91), range(96, 128), range(155, 160)), strict=True):
        alone, there = linear(x), fused[:, columns.start : columns.stop]
        assert bool((there == GUARD).all())
        assert linear(x, out=there).data_ptr() == there.data_ptr()
        assert torch.equal(there, alone)
    assert int((fused == GUARD).sum()) == rows * (160 - 90 - 32 - 5)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("x_type", "weight_format"), FORMS)
@pytest.mark.parametrize(("outputs", "gated"), [(90, False), (128, False), (192, True), (128, True)])
def test_an_addend_is_added_to_the_product_before_bias_and_gate(
    name: str, x_type: torch.dtype, weight_format: WeightFormat, outputs: int, gated: bool
) -> None:
    kept = weight_format(random(outputs, 64).to(x_type))
    bias = random(outputs).to(x_type)
    linear = make_linear(backend(name), kept, bias, gated=gated, x_type=x_type, y_type=torch.float32)
    for rows in (1, 4, 7, 33):
        x, addend = random(rows, 64).to(x_type), random(rows, outputs + 3)[:, 3:]
        expected = exact(x, exact_values(kept), bias) + addend.double()
        if gated:
            gate, up = expected.chunk(2, dim=1)
            expected = F.silu(gate) * up
        # torch rounds products of bfloat16.
        tolerance = 2**-6 if name == "reference" and x_type == torch.bfloat16 else 1e-4
        for given in (addend, addend.float()):
            y = linear(x, addend=given)
            torch.testing.assert_close(y.double(), expected, atol=8 * tolerance, rtol=tolerance)
