"""Products of `--activations int8`: what they compute, to the bit, on every target that this machine can run. Its name
is in the test's, so a run says which these were."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from int_products import FORMATS, ROWS, digest, product_by_hand, products
from torch import Tensor

from text_generation_common.cpu_features import NEEDS
from text_generation_common.errors import ModelError
from text_generation_common.flags.kinds import ActivationType
from text_generation_common.models.architecture import ClampedGate
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.values import Codes, Dense, Fp8, Groups, Int4, Int8, Table4
from text_generation_server.kernels import reference
from text_generation_server.kernels.cpu import CpuKernels, load_kernels
from text_generation_server.kernels.cpu.ints import IntLinear
from text_generation_server.kernels.cpu.library import VNNI
from text_generation_server.kernels.cpu.programs import DecodePrograms
from text_generation_server.kernels.interface import AdaptedPairs, AdapterMatrices, ExpertCodes, ExpertWeights, Routes

GOLDEN = Path(__file__).with_name("int_products.json")
ONE_PAIR = Routes(torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32))
TARGETS = [*NEEDS, *(f"{target} without VPDPBUSD" for target in VNNI)]


@pytest.fixture(scope="module", params=TARGETS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    target, _, without = request.param.partition(" ")
    found = load_kernels(target, ActivationType.int8)
    if found is None:
        pytest.skip(f"this machine does not run {target}")
    if not without and target in VNNI and not found.library.has_vnni:
        pytest.skip("this machine has no VPDPBUSD")
    found.library.has_vnni = not without
    return found


def linear_of(
    kernels: CpuKernels, weight: Codes, x: Tensor, bias: Tensor | None = None, gated: bool = False
) -> IntLinear:
    found = kernels.linear(weight, bias, gated=gated, x_type=x.dtype, y_type=torch.float32)
    assert isinstance(found, IntLinear)
    return found


def test_500_products_have_the_bits_of_the_golden_file_for_any_number_of_rows(kernels: CpuKernels) -> None:
    golden, wrong = json.loads(GOLDEN.read_text()), []
    assert sum(map(len, golden.values())) >= 500
    for name, weight, x in products():
        linear = linear_of(kernels, weight, x)
        wrong += [f"{name}, {n} rows" for n in ROWS if digest(linear(x[:n])) != golden[name][str(n)]]
    assert not wrong


def test_gated_products_and_experts_have_the_bits_of_the_golden_file(kernels: CpuKernels) -> None:
    """No other way computes these to the bit: the file has what `portable` makes."""
    golden, found = json.loads(GOLDEN.read_text()), {}
    for name, weight, x in products(sizes=[(96, 512)]):
        found[f"gated {name}"] = {"5": digest(linear_of(kernels, weight, x, gated=True)(x[:5]))}
        down = FORMATS["int4 g32"](512, 48, torch.Generator().manual_seed(1))
        expert = kernels.experts_of_codes([ExpertCodes([weight], down, None, None)], None, x.dtype)
        assert expert is not None
        found[f"expert {name}"] = {"1": digest(expert(x[:1], ONE_PAIR).float())}
    assert found == {name: golden[name] for name in found}


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_what_is_written_down_step_by_step(kernels: CpuKernels, name: str) -> None:
    [(_, weight, x)] = products([name], [(33, 1024)])
    x = torch.cat([x[:6], x[-1:]])
    y, exact = linear_of(kernels, weight, x)(x), product_by_hand(weight, x)
    assert torch.equal(y, exact)
    true = x.double() @ exact_weight(weight).double().t()
    assert (y - true).norm() < 0.03 * true.norm()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_at_any_place(kernels: CpuKernels, threads: int) -> None:
    for case, weight, x in products(sizes=[(70, 768)]):
        linear = linear_of(kernels, weight, x)
        linear._threads = threads
        together = linear(x[:37])
        assert all(torch.equal(linear(x[i : i + 1])[0], together[i]) for i in (0, 5, 36)), case
        assert torch.equal(linear(x[:37].flip(0)), together.flip(0)), case


def test_numbers_that_are_not_finite_make_their_row_so_and_no_other(kernels: CpuKernels) -> None:
    for case, weight, x in products(sizes=[(80, 512)]):
        spoilt = x[:4].clone()
        spoilt[1, 300], spoilt[2, 7] = float("nan"), float("-inf")
        linear = linear_of(kernels, weight, x)
        y = linear(spoilt)
        assert torch.equal(y[::3], linear(x[:4])[::3]) and not y[1:3].isfinite().any(), case


def test_bias_gate_and_addend_are_those_of_other_products(kernels: CpuKernels) -> None:
    for case, weight, x in products(["int8", "int4 zeros g128", "Q4_K"], [(80, 512)]):
        x, bias = x[:5], torch.linspace(-1, 1, 80)
        bare = linear_of(kernels, weight, x)(x)
        addend = torch.linspace(-2, 2, 400).view(5, 80)
        assert torch.equal(linear_of(kernels, weight, x, bias)(x, addend=addend), bare + addend + bias), case
        gate, up = (bare + bias).split(40, dim=1)
        y = linear_of(kernels, weight, x, bias, gated=True)(x)
        torch.testing.assert_close(y, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("name", [name for name in FORMATS if "order" not in name])
def test_rows_of_a_weight_are_read_back_to_the_bit(kernels: CpuKernels, name: str) -> None:
    weight = FORMATS[name](70, 256, torch.Generator().manual_seed(0))
    linear = linear_of(kernels, weight, torch.zeros(1, 256))
    ids = torch.tensor([69, 0, 33, 31, 32], dtype=torch.int32)
    assert linear.has_rows and torch.equal(linear.rows(ids), exact_weight(weight)[ids])


def test_rows_of_a_weight_are_looked_up_within_a_recorded_step(kernels: CpuKernels) -> None:
    weight = FORMATS["Q4_K"](70, 256, torch.Generator().manual_seed(0))
    linear, ids = linear_of(kernels, weight, torch.zeros(1, 256)), torch.tensor([5, 6], dtype=torch.int32)
    programs, calls = DecodePrograms(kernels.library, kernels.threads), list[int]()

    def forward(on_layer: Callable[[], None]) -> torch.Tensor:
        calls.append(1)
        return linear.rows(ids)

    for now in ([5, 6], [69, 0], [32, 31]):
        ids.copy_(torch.tensor(now))
        assert torch.equal(programs.run_with_head(2, forward, lambda x: x, lambda: None), exact_weight(weight)[ids])
    assert len(calls) == 1


def test_inputs_that_fill_no_block_count_as_zeros(kernels: CpuKernels) -> None:
    for name in ("int8", "int4 g32", "int4 order g128"):
        weight = FORMATS[name](40, 72, torch.Generator().manual_seed(1))
        x = torch.linspace(-3, 3, 2 * 72).view(2, 72)
        y, true = linear_of(kernels, weight, x)(x), x @ exact_weight(weight).t()
        assert (y - true).norm() < 0.03 * true.norm()


@pytest.mark.parametrize("clamped", [None, ClampedGate(1.25, 1.7)])
def test_experts_compute_their_tokens_alone_and_together(kernels: CpuKernels, clamped: ClampedGate | None) -> None:
    tokens, width, inner, chosen = 41, 256, 96, 3
    experts, numbers = [], []
    for number, name in enumerate(FORMATS):
        generator = torch.Generator().manual_seed(number)
        up = FORMATS[name](2 * inner, width, generator)
        down = FORMATS["int4 g32" if number % 2 else "int8"](width, inner, generator)
        experts.append(ExpertCodes([up], down, None, torch.linspace(-1, 1, width), factor=0.5))
        stacked = (Dense(exact_weight(weight).unsqueeze(0)) for weight in (up, down))
        numbers.append(ExpertWeights(*stacked, clamped=clamped))
    compute = kernels.experts_of_codes(experts, clamped, torch.float32)
    assert compute is not None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator)
    logits = torch.rand(tokens, len(FORMATS), generator=generator)
    logits[:, 4], logits[:, 5] = -9, 9  # an expert without tokens, and one with all

    count, slots = len(FORMATS), torch.arange(tokens, dtype=torch.int32) % 2 - 1  # every other token has an adapter
    gate_up, down = (
        AdapterMatrices(
            torch.randn(count, 4 * len(ends), inputs, generator=generator) * inputs**-0.5,
            torch.randn(count, 4, ends[-1], generator=generator),
            torch.full((count, len(ends)), 4, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32), ends,
        )
        for inputs, ends in ((width, (inner, 2 * inner)), (inner, (width,)))
    )  # fmt: skip

    def of(part: slice) -> Tensor:
        routes = kernels.route(logits[part].contiguous(), chosen, True)
        adapted = AdaptedPairs(kernels, kernels.pair_slots(slots[part], routes), gate_up, down)
        return compute(x[part], routes, adapted=adapted)

    together = of(slice(None))
    values, ids = logits.topk(chosen)
    expected = torch.zeros(tokens, width)
    for t in range(tokens):
        for share, expert in zip(values[t].softmax(0), ids[t].tolist(), strict=True):
            slot = torch.tensor([-1 if slots[t] < 0 else expert])
            adapted = AdaptedPairs(reference, slot, gate_up, replace(down, up=down.up / 0.5))
            of_one = reference.experts(x[t : t + 1], ONE_PAIR, numbers[expert], adapted)[0]
            expected[t] += share * (of_one * 0.5 + torch.linspace(-1, 1, width))
    assert (together - expected).norm() < 0.03 * expected.norm()
    for part in (slice(0, 1), slice(9, 10), slice(20, 24)):
        assert torch.equal(of(part), together[part])


def test_what_has_no_integers_is_refused_by_name(kernels: CpuKernels) -> None:
    scales, q = torch.ones(4, 2), torch.zeros(4, 32, dtype=torch.uint8)
    refused: list[tuple[Codes, str]] = [
        (Fp8(torch.ones(4, 64).to(torch.float8_e4m3fn), Groups(32, scales)), "weights in fp8"),
        (Table4(q, Groups(32, scales), torch.linspace(0, 1, 16)), "other numbers than integers"),
        (Int4(q, Groups(48, scales)), "weights in groups of 48"),
        (
            Int8(torch.zeros(1, 65537, dtype=torch.int8), Groups(65537, scales[:1, :1])),
            "of 65568 inputs with one scale",
        ),
    ]
    for weight, words in refused:
        with pytest.raises(ModelError, match=f"--activations int8 does not multiply .*{words}: start without it"):
            kernels.linear(weight, None, gated=False, x_type=torch.float32, y_type=torch.float32)
