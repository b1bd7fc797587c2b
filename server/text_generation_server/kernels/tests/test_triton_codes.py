"""Products of the Triton kernels by weights in codes, compared with the numbers that the codes stand for.

What lies behind rows, outputs and groups in memory is NaN, so that reading it by mistake is noticed.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from weight_forms import PACKED, random_weight

from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.tensors.splits import on_outputs, on_tensors
from text_generation_common.quantized.values import Fp8, Groups, Int4, Weight
from text_generation_server.kernels import reference

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from text_generation_server.kernels import triton as kernels
from text_generation_server.kernels.triton import codes
from text_generation_server.kernels.triton.codes import WIDE_ROWS, UnpackingLinear
from text_generation_server.kernels.triton.interpreter import products_in_fixed_order
from text_generation_server.kernels.triton.tuning import Gpu

from .test_triton import Operations

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU
# Tolerance by type of the model. The kernel rounds tables, and W where groups are small; it sums exact products else.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
NAN = float("nan")
# (rows, outputs, inputs, inputs of a group): a group of no power of 2, groups of half a tile, two splits of which the
# second is shorter and ends within a group, and one group for all inputs.
SHAPES = [(5, 70, 200, 40), (3, 64, 192, 64), (17, 66, 330, 128), (2, 20, 136, 136)]
SHAPES += [(rows, 4096, 4096, 128) for rows in (1, 16, 64)] * GPU


@pytest.fixture(autouse=True)
def splits_of_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(codes, "MIN_STEPS", 1)
        monkeypatch.setattr(codes, "PROGRAMS", 4)


def poisoned(weight: Weight) -> Weight:
    """The weight, with NaN behind its last output where its type has NaN, and other codes elsewhere."""

    def change(part: Tensor) -> Tensor:
        behind = torch.full_like(part[:1], NAN) if part.dtype.is_floating_point else part[:1].flip(1)
        return torch.cat([part, behind])[: len(part)]

    return on_outputs(weight, change)


def weight_of(form: str, outputs: int, inputs: int, size: int) -> Weight:
    return poisoned(on_tensors(random_weight(form, outputs, inputs, size), lambda part: part.to(DEVICE)))


def rows_of(count: int, inputs: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(count)
    x = torch.randn(count + 1, inputs, device=DEVICE).to(dtype)
    x[count] = NAN
    return x[:count]


def layer(weight: Weight, dtype: torch.dtype, bias: Tensor | None = None, **options: Any) -> Any:
    return kernels.linear(weight, bias, **{"gated": False, "x_type": dtype, "y_type": torch.float32} | options)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    largest = expected.abs().max()
    torch.testing.assert_close(
        actual.double() / largest, expected.double() / largest, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", PACKED)
def test_products_are_those_of_the_numbers(form: str, dtype: torch.dtype) -> None:
    for rows, *size in SHAPES:
        weight, x = weight_of(form, *size), rows_of(rows, size[1], dtype)
        linear = layer(weight, dtype)
        assert isinstance(linear, UnpackingLinear)
        is_exact = form != "table4" and size[2] != 40
        close(linear(x), x.double() @ exact_weight(weight).double().T, torch.float32 if is_exact else dtype)


@pytest.mark.parametrize("form", PACKED)
def test_from_many_rows_on_the_weight_is_that_of_its_formula_rounded_to_the_type(form: str) -> None:
    """To the bit: the rows are those of the unit matrix."""
    for size in (40, 64, 136):
        weight = weight_of(form, 70, WIDE_ROWS + 8, size)
        for dtype in DTYPES:
            x = torch.eye(WIDE_ROWS + 8, device=DEVICE, dtype=dtype)
            assert torch.equal(layer(weight, dtype, y_type=dtype)(x), exact_weight(weight).to(dtype).T)


@pytest.mark.parametrize(
    ("form", "size"), [("int4 zeros", 128), ("int4 order", 32), ("int8", 330), ("fp8", 128), ("table4", 64)]
)
def test_a_row_s_bits_do_not_depend_on_other_rows(form: str, size: int) -> None:
    """On a GPU, nor on whether a graph has the product."""
    for dtype in DTYPES[1:]:
        x, linear = rows_of(37, 330, dtype), layer(weight_of(form, 66, 330, size), dtype)
        with products_in_fixed_order():
            y = linear(x)
            for rows in (slice(0, 1), slice(16, 18)):
                assert torch.equal(linear(x[rows]), y[rows])
        if GPU:
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                recorded = linear(x)
            graph.replay()
            assert torch.equal(recorded, y)


@pytest.mark.parametrize("rows", [5, WIDE_ROWS])
@pytest.mark.parametrize("gated", [False, True])
def test_factor_addend_bias_and_gate_are_those_of_the_reference(gated: bool, rows: int) -> None:
    """The result goes into some columns of a tensor, and no others change."""
    for dtype in DTYPES[1:]:
        weight, x, columns = weight_of("int4", 90, 64, 32), rows_of(rows, 64, dtype), 45 if gated else 90
        bias = torch.randn(90, device=DEVICE).to(dtype)
        for added in (None, torch.randn(rows, 90, device=DEVICE), torch.randn(rows, 100, device=DEVICE).to(dtype)):
            addend = None if added is None else added[:, :90]
            options = {"gated": gated, "x_type": dtype, "y_type": dtype, "factor": 0.5}
            whole = torch.full((rows, 128), NAN, dtype=dtype, device=DEVICE)
            out = whole[:, 3 : 3 + columns]
            assert layer(weight, dtype, bias, **options)(x, out=out, addend=addend) is out
            on_host = on_tensors(weight, lambda part: part.cpu()), bias.cpu(), None if addend is None else addend.cpu()
            expected = reference.linear(on_host[0], on_host[1], **options)(x.cpu(), addend=on_host[2])
            close(out.cpu(), expected, dtype)
            assert whole[:, :3].isnan().all() and whole[:, 3 + columns :].isnan().all()


def test_gpus_without_fp8_read_the_same_numbers_from_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.arange(-128, 128, device=DEVICE).to(torch.int8).view(torch.float8_e4m3fn).view(2, 128)
    q = torch.where(q.float().isfinite(), q.float(), 0.0).to(q.dtype)
    weight, x = Fp8(q, Groups(128, torch.ones(2, 1, device=DEVICE))), rows_of(3, 128, torch.float16)
    of_numbers = layer(weight, torch.float16)(x)
    monkeypatch.setattr(codes, "gpu_of", lambda device: Gpu("", 80))
    of_bytes = layer(weight, torch.float16)
    assert of_bytes._codes["q"].dtype == torch.uint8
    assert torch.equal(of_bytes(x), of_numbers)
    q.view(torch.int8)[1, 5] = 127  # NaN, which the interpreter knows as bytes only
    assert torch.equal(layer(weight, torch.float16)(x).isnan(), torch.tensor([[False, True]] * 3, device=DEVICE))


def test_two_codes_of_a_byte_in_two_groups_are_torch_s() -> None:
    weight, x = weight_of("int4", 6, 30, 15), rows_of(2, 30, torch.float32)
    linear = layer(weight, torch.float32)
    assert not isinstance(linear, UnpackingLinear)
    close(linear(x), x.double() @ exact_weight(weight).double().T, torch.float32)


def test_a_product_launches_two_kernels_and_nothing_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph has both kernels, and the memory of the splits' sums."""
    launched: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: launched.append(self.name)

    for name in ("_multiply_codes", "_add_splits"):
        monkeypatch.setattr(codes, name, Noted(name))
    with FakeTensorMode(), Operations() as operations:
        q = torch.empty(64, 128, dtype=torch.uint8, device="cuda")
        weight = Int4(q, Groups(128, torch.empty(64, 2, dtype=torch.float16, device="cuda")))
        linear = layer(weight, torch.bfloat16, y_type=torch.bfloat16)
        x = torch.empty(3, 256, dtype=torch.bfloat16, device="cuda")
        operations.names.clear()
        y = linear(x)
    assert (y.dtype, y.shape, launched) == (torch.bfloat16, (3, 64), ["_multiply_codes", "_add_splits"])
    assert operations.names == ["aten::empty.memory_format"] * 2
