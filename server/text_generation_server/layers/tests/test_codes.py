"""Products of weights in every form, for every processor that has a compiled library."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden_layers import Case
from safetensors.torch import load_file
from shard_tools import usable_kernels
from torch import Tensor
from weight_forms import FORMS, random_weight
from written_codes import FORMATS

from text_generation_common.cpu_features import NEEDS
from text_generation_common.gguf.types import BY_NAME
from text_generation_common.quantized import tensors as of_common
from text_generation_common.quantized.tensors.blocks import READERS, read_blocks
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.tensors.splits import inputs_of
from text_generation_common.quantized.values import (
    CodedScales,
    Dense,
    Fp8,
    Groups,
    Int4,
    RunNumbers,
    SharedNumbers,
    Table4,
    Weight,
)  # fmt: skip
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.codes import CodesLinear
from text_generation_server.kernels.interface import HoldsRows, LinearKernel
from text_generation_server.layers.linear import make_linear

TYPES = [torch.bfloat16, torch.float32]
GUARD = 77.0


@pytest.fixture(params=NEEDS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return usable_kernels(request.param)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def weight_of(form: str, outputs: int, inputs: int, size: int) -> Weight:
    """Random weights; dense ones in float16, because other products multiply bfloat16."""
    weight = random_weight(form, outputs, inputs, size)
    return Dense(weight.values.half()) if isinstance(weight, Dense) else weight


def layer(kernels: CpuKernels, weight: Weight, x_type: torch.dtype = torch.bfloat16, **options: Any) -> LinearKernel:
    """A layer with float32 results."""
    made = make_linear(kernels, weight, x_type=x_type, y_type=torch.float32, **options)
    assert isinstance(made, CodesLinear)
    return made


# (outputs, inputs), and inputs of a group: two groups; a last group with fewer inputs; a group that goes on in the
# next part of the inputs; outputs that fill no panels; inputs and groups that are not whole steps; one group.
SHAPES = [
    ((64, 64), 32), ((96, 96), 36), ((32, 1120), 528), ((32, 576), 64), ((90, 128), 64), ((33, 30), 12), ((7, 38), 38),
    ((34, 26), 5),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("shape", "size"), SHAPES, ids=str)
def test_products_are_those_of_the_numbers(kernels: CpuKernels, form: str, shape: tuple[int, int], size: int) -> None:
    weight, bias = weight_of(form, *shape, size), random(shape[0])
    exact = exact_weight(weight).double()
    for x_type in TYPES:
        linear = layer(kernels, weight, x_type=x_type, bias=bias)
        for rows in (1, 2, 5, 7, 13, 40):
            x = random(rows, shape[1]).to(x_type)
            expected = x.double() @ exact.T + bias.double()
            torch.testing.assert_close(linear(x).double(), expected, atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gates_addends_and_factors_are_applied_to_the_product(kernels: CpuKernels, form: str) -> None:
    """The gates fill no panels."""
    weight, bias, x, addend = weight_of(form, 124, 96, 32), random(124), random(9, 96), random(9, 124)
    factor = 1 if form == "dense" else 0.25
    linear = layer(kernels, weight, bias=bias, gated=True, factor=factor)
    gate, up = (factor * x.double() @ exact_weight(weight).double().T + bias + addend).chunk(2, dim=1)
    fused = torch.full((9, 70), GUARD)
    linear(x, out=fused[:, 3:65], addend=addend)
    torch.testing.assert_close(fused[:, 3:65].double(), F.silu(gate) * up, atol=1e-3, rtol=1e-4)
    assert bool((fused[:, :3] == GUARD).all()) and bool((fused[:, 65:] == GUARD).all())


@pytest.mark.parametrize("size", [32, 48])
def test_a_ranks_part_of_sorted_inputs_is_multiplied_as_codes(kernels: CpuKernels, size: int) -> None:
    weight, x = random_weight("int4 order", 64, 192, size), random(5, 96)
    linear = make_linear(kernels, inputs_of(weight, range(40, 136)), x_type=torch.bfloat16, y_type=torch.float32)
    expected = x.double() @ exact_weight(weight)[:, 40:136].double().T
    torch.testing.assert_close(linear(x).double(), expected, atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [32, 640])
def test_a_rows_bits_depend_on_no_other_row_and_on_no_thread(kernels: CpuKernels, form: str, size: int) -> None:
    weight = weight_of(form, 64, 1280, size)
    for x_type in TYPES:
        kernels.threads, x = 1, random(100, 1280).to(x_type)
        whole = layer(kernels, weight, x_type=x_type)(x)
        for threads in (1, 3):
            kernels.threads = threads
            linear = layer(kernels, weight, x_type=x_type)
            for count in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 40, 97, 100):
                assert torch.equal(linear(x[:count]), whole[:count])
                assert torch.equal(linear(x[100 - count :]), whole[100 - count :])


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_an_embedding_are_read_from_the_panels(kernels: CpuKernels, form: str) -> None:
    weight, ids = weight_of(form, 90, 132, 64), torch.tensor([89, 0, 16, 17, 0], dtype=torch.int32)
    for x_type in TYPES:
        linear = layer(kernels, weight, x_type=x_type)
        assert isinstance(linear, HoldsRows) and linear.has_rows
        assert torch.equal(linear.rows(ids), exact_weight(weight)[ids].to(x_type))


def coded_weight(kind: str, outputs: int, inputs: int, size: int) -> Weight:
    """Random weights whose scales lie in fewer bits, as files have them."""
    generator, count = torch.Generator().manual_seed(outputs), -(-inputs // size)
    if kind == "blocks":  # a block has 16 outputs
        shared = torch.rand(-(-outputs // 16) * count, generator=generator)
        starts = torch.arange(outputs, dtype=torch.int32).unsqueeze(1) // 16 * count
        weight = random_weight("fp8", outputs, inputs, size)
        assert isinstance(weight, Fp8)
        return replace(weight, groups=Groups(size, SharedNumbers(shared, starts, count)))
    codes = torch.randint(1, 120, (outputs, count), generator=generator).to(torch.uint8)
    if kind == "two levels":  # as in K-quants
        weight = random_weight("int4", outputs, inputs, size)
        halves = torch.rand(2, outputs, -(-count // 8), generator=generator).half()
        both = [CodedScales(codes % 64, None, RunNumbers(numbers, count, 8)) for numbers in halves]
        assert isinstance(weight, Int4)
        return replace(weight, groups=Groups(size, both[0], offsets=both[1]))
    scales: Any = CodedScales(codes, torch.arange(256.0) - 32)  # integers with a sign
    if kind == "powers":
        scales = codes.view(torch.float8_e8m0fnu)
    elif kind == "fp8 divided":
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num()
        scales = CodedScales(codes, numbers / 3.7)
    elif kind != "integers":
        starts = torch.arange(outputs, dtype=torch.int32).unsqueeze(1) * count
        factors = SharedNumbers(torch.rand(outputs * count // 8 + 1, generator=generator), starts, count, 8)
        parts = torch.rand(2, generator=generator)  # joined layers have one each
        extras = SharedNumbers(
            parts, (torch.arange(outputs, dtype=torch.int32).unsqueeze(1) // 8 % 2) * count, count, count
        )
        table = torch.linspace(-1, 1, 256) if kind == "table" else torch.arange(256.0)
        scales = CodedScales(codes, table, factors, extras if kind == "table" else None)
    weight = random_weight("table4", outputs, inputs, size)
    assert isinstance(weight, Table4)
    if kind == "powers":  # products are compared with an absolute tolerance
        scales = (codes % 8 + 122).view(torch.float8_e8m0fnu)
    return replace(weight, groups=Groups(size, scales))


CODED = ["blocks", "two levels", "powers", "integers", "integers times factors", "fp8 divided", "table"]


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize(("shape", "size"), [((64, 256), 16), ((80, 576), 64), ((48, 96), 32)], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_scales_in_few_bits_are_those_of_the_numbers(
    kernels: CpuKernels, kind: str, shape: tuple[int, int], size: int, gated: bool
) -> None:
    weight, x = coded_weight(kind, *shape, size), random(7, shape[1])
    exact = exact_weight(weight)
    expected = x.double() @ exact.double().T
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    linear = layer(kernels, weight, gated=gated)
    y = linear(x)
    assert ((y - expected).abs().max() / expected.abs().max()).item() < 2e-6
    assert all(torch.equal(linear(x[:count]), y[:count]) for count in (1, 3, 4))
    if not gated:
        ids = torch.tensor([47, 0, 16, 17, 0], dtype=torch.int32)
        for x_type in TYPES:
            linear = layer(kernels, weight, x_type=x_type)
            assert isinstance(linear, HoldsRows) and torch.equal(linear.rows(ids), exact[ids].to(x_type))


# Bits for each weight, of which the panels of 4,096 inputs take 1.03 times the file's at most.
@pytest.mark.parametrize(
    ("kind", "size", "bits"),
    [
        ("fp8 divided", 16, 4.5),
        ("table", 64, 4.14),
        ("blocks", 128, 8.002),
        ("powers", 32, 4.25),
        ("two levels", 32, 4.5),
    ],
)
def test_panels_take_the_bits_of_the_files(kernels: CpuKernels, kind: str, size: int, bits: float) -> None:
    linear = layer(kernels, coded_weight(kind, 64, 4096, size))
    assert isinstance(linear, CodesLinear)
    assert 8 * linear.nbytes / (64 * 4096) <= bits * 1.03


FEW_BITS = ("gptq 2 bits", "gptq 3 bits")


@pytest.mark.parametrize(
    "name", [*(name for name in FORMATS if name not in FEW_BITS), *(f"{name}, large groups" for name in FEW_BITS)]
)
def test_panels_of_a_format_take_the_bits_of_its_files(kernels: CpuKernels, name: str) -> None:
    """Codes of 2 and 3 bits may lie in 4.6."""
    format, _, is_large = name.partition(", ")
    write, settings = FORMATS[format]
    if is_large:
        write, settings = partial(write, size=128), {**settings, "group_size": 128}
    tensors = write(64, 1024).tensors
    case = Case({**settings}, (64, 1024), {f"l{end}": tensor for end, tensor in tensors.items()}, torch.empty(0))
    # Without an order of inputs the groups of inputs are those of their places.
    unread = {".bias"} if settings.get("desc_act") else {".bias", ".g_idx"}
    stored = sum(tensor.nbytes for end, tensor in tensors.items() if end not in unread)
    most = 4.6 * 64 * 1024 / 8 if is_large else 1.03 * stored
    assert layer(kernels, case.read(), x_type=torch.float32).nbytes <= most


GOLDEN = load_file(Path(*of_common.__path__).parent / "tests" / "goldens" / "gguf" / "blocks.safetensors")
MAX_BITS = {"Q2_K": 4.6, "Q3_K": 4.6}  # in memory; other types take as many as files, and 3 % more


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("part", [range(512), range(40, 344)], ids=str)
def test_blocks_of_gguf_files_keep_their_numbers_and_their_size(kernels: CpuKernels, kind: str, part: range) -> None:
    """The numbers are those of the package `gguf`. A part that begins inside a block has more scales."""
    exact = GOLDEN[f"{kind} W"].repeat(8, 1)[:, part.start : part.stop]
    weight = inputs_of(read_blocks(kind, GOLDEN[kind].repeat(8, 1), "l"), part)
    for x_type in TYPES:
        linear, x = layer(kernels, weight, x_type=x_type), random(40, len(part)).to(x_type)
        assert isinstance(linear, CodesLinear)
        assert torch.equal(linear.rows(torch.arange(32, dtype=torch.int32)), exact.to(x_type))
        if len(part) == 512:
            most = MAX_BITS.get(kind, 1.03 * 8 * BY_NAME[kind].bytes / BY_NAME[kind].block)
            assert 8 * linear.nbytes <= most * exact.numel()
        y, expected = linear(x).nan_to_num(), x.double() @ exact.double().T
        sizes = x.double().abs() @ exact.double().abs().T  # numbers of MXFP4 are up to 2^127: infinite sums
        assert bool(((y - expected).abs() <= 1e-6 * sizes).logical_or(sizes > 1e37).all())
        assert all(torch.equal(linear(x[:rows]).nan_to_num(), y[:rows]) for rows in range(1, 40))


def test_each_code_of_8_bits_is_its_number_or_makes_its_output_not_a_number(kernels: CpuKernels) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1)
    weight = Fp8(codes, Groups(1, torch.ones(256, 1)))
    for x_type in TYPES:
        for rows in (1, 4):
            y = layer(kernels, weight, x_type=x_type)(torch.ones(rows, 1, dtype=x_type))
            assert torch.equal(y.nan_to_num(99), codes.float().T.expand(rows, 256).nan_to_num(99))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_of_all_sizes_keep_their_bits(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Also those below the smallest normal number of float16, and infinity."""
    powers = torch.arange(-24, 16).double().exp2().to(dtype)
    values = torch.cat([powers, -powers, powers * 1.5, torch.tensor([0.0, float("inf")]).to(dtype)]).unsqueeze(1)
    for rows in (1, 4):
        y = layer(kernels, Dense(values))(torch.ones(rows, 1).bfloat16())
        assert torch.equal(y, values.float().T.expand(rows, -1))
