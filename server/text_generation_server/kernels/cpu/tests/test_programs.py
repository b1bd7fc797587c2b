"""A program does what the step did that it was recorded from, with what lies at its addresses now."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from text_generation_server.kernels.cpu import load_kernels
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.library import Call
from text_generation_server.kernels.cpu.programs import ALIGNMENT, LAYERS_AT_ONCE, DecodePrograms, Signal, plan

HIDDEN = 64
WEIGHT = torch.randn((100, HIDDEN), generator=torch.Generator().manual_seed(0))
NORM = torch.linspace(0.5, 1.5, HIDDEN)


@pytest.fixture
def kernels() -> CpuKernels:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("needs a C compiler (cc) when the package is installed")
    return kernels


@pytest.fixture
def programs(kernels: CpuKernels) -> DecodePrograms:
    return DecodePrograms(kernels.library, kernels.threads)


def forward_of(kernels: CpuKernels, ids_T: Tensor, layers: int) -> Callable[[Signal], Tensor]:
    """Layers whose tensors live for a while each: x is made anew, the residual is written to in place."""

    def forward(on_layer: Signal) -> Tensor:
        residual = kernels.embed(ids_T, WEIGHT)
        x = kernels.rms_norm(residual, NORM, 1e-5)
        for _ in range(layers):
            x = kernels.rms_norm(x, NORM, 1e-5)
            x, residual = kernels.add_rms_norm(x, residual, NORM, 1e-5)
            on_layer()
        return x

    return forward


def by_hand(kernels: CpuKernels, ids: list[int], layers: int) -> Tensor:
    return forward_of(kernels, torch.tensor(ids, dtype=torch.int32), layers)(lambda: None)


def test_a_program_computes_what_its_inputs_say_now(kernels: CpuKernels, programs: DecodePrograms) -> None:
    ids = torch.tensor([1, 2, 3], dtype=torch.int32)
    forward = forward_of(kernels, ids, 5)
    first = programs.run(3, forward, lambda: None).clone()
    assert torch.equal(first, by_hand(kernels, [1, 2, 3], 5))
    for now in ([1, 2, 3], [90, 7, 7], [5, 6, 99]):
        ids.copy_(torch.tensor(now))
        asked: list[int] = []
        assert torch.equal(programs.run(3, never(asked), lambda: None), by_hand(kernels, now, 5))
        assert not asked


def never(asked: list[int]) -> Callable[[Signal], Tensor]:
    def forward(on_layer: Signal) -> Tensor:
        asked.append(1)
        return torch.empty(0)

    return forward


def test_programs_of_all_sizes_share_an_arena_that_grows(kernels: CpuKernels, programs: DecodePrograms) -> None:
    inputs = {rows: torch.arange(rows, dtype=torch.int32) for rows in (1, 40, 3, 90)}
    for rows, ids in inputs.items():
        programs.run(rows, forward_of(kernels, ids, 3), lambda: None)
    for rows, ids in inputs.items():
        ids += 7
        said = programs.run(rows, never([]), lambda: None)
        assert torch.equal(said, by_hand(kernels, ids.tolist(), 3))


def test_a_sign_of_life_comes_after_every_few_layers(kernels: CpuKernels, programs: DecodePrograms) -> None:
    signs: list[int] = []
    layers = 2 * LAYERS_AT_ONCE + 3
    forward = forward_of(kernels, torch.tensor([4], dtype=torch.int32), layers)
    programs.run(1, forward, lambda: signs.append(1))
    assert len(signs) == layers
    signs.clear()
    programs.run(1, never([]), lambda: signs.append(1))
    assert len(signs) == 3


def test_a_step_in_which_torch_computes_is_never_replayed(
    kernels: CpuKernels, programs: DecodePrograms, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.tensor([1, 2], dtype=torch.int32)

    def forward(on_layer: Signal) -> Tensor:
        return kernels.embed(ids + 1, WEIGHT)

    with caplog.at_level("INFO"):
        programs.run(2, forward, lambda: None)
    assert "aten::add" in caplog.text
    ids.fill_(8)
    assert torch.equal(programs.run(2, forward, lambda: None), WEIGHT[[9, 9]])


def test_after_a_failure_nothing_is_kept_and_the_next_step_is_recorded(
    kernels: CpuKernels, programs: DecodePrograms
) -> None:
    ids = torch.tensor([1, 2], dtype=torch.int32)

    def failing(on_layer: Signal) -> Tensor:
        kernels.embed(ids, WEIGHT)
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        programs.run(2, failing, lambda: None)
    assert kernels.library.listener is None
    programs.run(2, forward_of(kernels, ids, 1), lambda: None)
    assert torch.equal(programs.run(2, never([]), lambda: None), by_hand(kernels, [1, 2], 1))


def test_after_clear_the_addresses_are_forgotten(kernels: CpuKernels, programs: DecodePrograms) -> None:
    programs.run(1, forward_of(kernels, torch.tensor([1], dtype=torch.int32), 1), lambda: None)
    programs.clear()
    said = programs.run(1, forward_of(kernels, torch.tensor([2], dtype=torch.int32), 1), lambda: None)
    assert torch.equal(said, by_hand(kernels, [2], 1))


@st.composite
def uses(draw: st.DrawFn) -> tuple[list[Tensor], list[list[int]]]:
    """Tensors, and which of them each call uses; all are used."""
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=12))
    calls = draw(st.lists(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3), min_size=1, max_size=20))
    return [torch.empty(size, dtype=torch.uint8) for size in sizes], [*calls, list(range(len(sizes)))[:1]]


@given(uses())
def test_tensors_that_are_in_use_at_the_same_time_lie_apart(drawn: tuple[list[Tensor], list[list[int]]]) -> None:
    tensors, used = drawn
    calls = [Call("advance", (tensors[u].data_ptr(), 0, 0, 0, 0, 0)) for call in used for u in call]
    output = tensors[used[-1][-1]]
    moves = plan(calls, tensors, output)
    numbers = [u for call in used for u in call]
    spans = {t: [numbers.index(t), len(numbers) - 1 - numbers[::-1].index(t)] for t in set(numbers)}
    spans[used[-1][-1]][1] = len(numbers)
    places = {t: (moves.offset(tensors[t].data_ptr()), tensors[t].nbytes) for t in spans}
    for a, b in pairs(list(spans)):
        if spans[a][0] <= spans[b][1] and spans[b][0] <= spans[a][1]:
            (at, size), (other, other_size) = places[a], places[b]
            assert at + size <= other or other + other_size <= at
    assert all(at % ALIGNMENT == 0 and at + size <= moves.size for at, size in places.values())


def pairs(items: list[int]) -> Iterator[tuple[int, int]]:
    return ((a, b) for i, a in enumerate(items) for b in items[i + 1 :])
