"""A recorded decode program repeats the step that it was recorded from, but with the numbers that are at the recorded
addresses when it is replayed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from text_generation_common.tests.slowness import Seconds, assert_within
from text_generation_server.device.graphs import Forward, Head, Signal
from text_generation_server.kernels.cpu import load_kernels
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.programs import (
    ALIGNMENT,
    LAYERS_AT_ONCE,
    DecodePrograms,
    RecordedCall,
    TensorAddress,
    plan,
)

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


def nothing() -> None: ...


def run(
    programs: DecodePrograms, size: int, forward: Forward, on_layer: Signal = nothing, head: Head = lambda x: x
) -> Tensor:
    result = programs.run_with_head(size, forward, head, on_layer)
    assert result is not None
    return result


def forward_of(kernels: CpuKernels, ids_T: Tensor, layers: int) -> Callable[[Signal], Tensor]:
    """A forward pass of layers whose tensors are needed for different times: x is made anew, the residual is
    overwritten in place."""

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
    first = run(programs, 3, forward).clone()
    assert torch.equal(first, by_hand(kernels, [1, 2, 3], 5))
    for now in ([1, 2, 3], [90, 7, 7], [5, 6, 99]):
        ids.copy_(torch.tensor(now))
        asked: list[int] = []
        assert torch.equal(run(programs, 3, never(asked)), by_hand(kernels, now, 5))
        assert not asked


def never(asked: list[int]) -> Callable[[Signal], Tensor]:
    def forward(on_layer: Signal) -> Tensor:
        asked.append(1)
        return torch.empty(0)

    return forward


def test_the_head_is_part_of_the_program_if_kernels_compute_it(kernels: CpuKernels, programs: DecodePrograms) -> None:
    ids, asked = torch.tensor([1, 2], dtype=torch.int32), []

    def head(hidden: Tensor) -> Tensor:
        asked.append("kernel")
        return kernels.rms_norm(hidden, NORM, 1.0)

    def head_of_torch(hidden: Tensor) -> Tensor:
        asked.append("torch")
        return kernels.rms_norm(hidden, NORM, 1.0) * 2

    for size, of, times in ((2, head, 1), (1, head_of_torch, 2)):
        asked.clear()
        forward = forward_of(kernels, ids[:size], 3)
        for now in ([1, 2], [9, 4]):
            ids.copy_(torch.tensor(now))
            said = run(programs, size, forward if now[0] == 1 else never([]), head=of).clone()
            assert torch.equal(said, of(by_hand(kernels, now[:size], 3)))
            asked.pop()
        assert len(asked) == times


def test_programs_of_all_sizes_share_an_arena_that_grows(kernels: CpuKernels, programs: DecodePrograms) -> None:
    inputs = {rows: torch.arange(rows, dtype=torch.int32) for rows in (1, 40, 3, 90)}
    for rows, ids in inputs.items():
        run(programs, rows, forward_of(kernels, ids, 3))
    for rows, ids in inputs.items():
        ids += 7
        said = run(programs, rows, never([]))
        assert torch.equal(said, by_hand(kernels, ids.tolist(), 3))


def test_a_sign_of_life_comes_after_every_few_layers(kernels: CpuKernels, programs: DecodePrograms) -> None:
    signs: list[int] = []
    layers = 2 * LAYERS_AT_ONCE + 3
    forward = forward_of(kernels, torch.tensor([4], dtype=torch.int32), layers)
    run(programs, 1, forward, lambda: signs.append(1))
    assert len(signs) == layers
    signs.clear()
    run(programs, 1, never([]), lambda: signs.append(1))
    assert len(signs) == 3


def test_a_step_in_which_torch_computes_is_never_replayed(
    kernels: CpuKernels, programs: DecodePrograms, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.tensor([1, 2], dtype=torch.int32)

    def forward(on_layer: Signal) -> Tensor:
        return kernels.embed(ids + 1, WEIGHT)

    with caplog.at_level("INFO"):
        run(programs, 2, forward)
    assert "aten::add" in caplog.text
    ids.fill_(8)
    assert torch.equal(run(programs, 2, forward), WEIGHT[[9, 9]])


def test_after_a_failure_nothing_is_kept_and_the_next_step_is_recorded(
    kernels: CpuKernels, programs: DecodePrograms
) -> None:
    ids = torch.tensor([1, 2], dtype=torch.int32)

    def failing(on_layer: Signal) -> Tensor:
        kernels.embed(ids, WEIGHT)
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        run(programs, 2, failing)
    assert kernels.library.observer is None
    run(programs, 2, forward_of(kernels, ids, 1))
    assert torch.equal(run(programs, 2, never([])), by_hand(kernels, [1, 2], 1))


def test_after_clear_the_addresses_are_forgotten(kernels: CpuKernels, programs: DecodePrograms) -> None:
    run(programs, 1, forward_of(kernels, torch.tensor([1], dtype=torch.int32), 1))
    programs.clear()
    said = run(programs, 1, forward_of(kernels, torch.tensor([2], dtype=torch.int32), 1))
    assert torch.equal(said, by_hand(kernels, [2], 1))


@pytest.mark.parametrize("change", ["to", "contiguous", "add"])
def test_a_copy_that_torch_calls_a_view_is_not_part_of_a_program(
    kernels: CpuKernels, programs: DecodePrograms, change: str
) -> None:
    ids = torch.tensor([1, 2], dtype=torch.int32)
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "to": lambda x: x.to(torch.bfloat16).to(torch.float32),
        "contiguous": lambda x: x[:, :32].contiguous(),
        "add": lambda x: x + 0,
    }

    def forward(on_layer: Signal) -> Tensor:
        return kernels.rms_norm(
            changes[change](kernels.embed(ids, WEIGHT)), NORM[:32] if change == "contiguous" else NORM, 1
        )

    with torch.inference_mode():
        run(programs, 2, forward)
        ids.fill_(8)
        assert torch.equal(run(programs, 2, forward), forward(lambda: None))


def test_one_thread_and_all_make_the_same(kernels: CpuKernels) -> None:
    ids = torch.arange(50, dtype=torch.int32)
    forward = forward_of(kernels, ids, 3)
    for threads in (1, kernels.threads, kernels.threads + 3):
        programs = DecodePrograms(kernels.library, threads)
        run(programs, 50, forward)
        assert torch.equal(run(programs, 50, never([])), by_hand(kernels, ids.tolist(), 3))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int]:
    """Sizes of tensors, which of them each call uses, and which is the output."""
    sizes = draw(st.lists(st.integers(0, 300), min_size=1, max_size=12))
    tensors = st.integers(0, len(sizes) - 1)
    calls = draw(st.lists(st.lists(tensors, min_size=1, max_size=4), min_size=1, max_size=20))
    return sizes, calls, draw(tensors)


@given(steps())
def test_tensors_that_are_in_use_at_the_same_time_lie_apart(drawn: tuple[list[int], list[list[int]], int]) -> None:
    sizes, used, output = drawn
    calls = [
        RecordedCall("place", {str(i): TensorAddress(tensor, 0) for i, tensor in enumerate(call)}) for call in used
    ]
    offsets, size = plan(calls, sizes, output)
    held = {t: {n for n, call in enumerate(used) if t in call} for t in {output, *(t for call in used for t in call)}}
    held[output].add(len(used))
    held = {t: set(range(min(numbers), max(numbers) + 1)) for t, numbers in held.items()}
    for a, b in pairs(list(held)):
        if held[a] & held[b]:
            assert offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]
    assert all(offsets[t] % ALIGNMENT == 0 and offsets[t] + sizes[t] <= size for t in held)


def pairs(items: list[int]) -> Iterator[tuple[int, int]]:
    return ((a, b) for i, a in enumerate(items) for b in items[i + 1 :])


# The threads that run the compiled kernels: they are started once, shared by all callers, and asleep between steps.
# Large enough for all threads.
X, LONG_NORM = torch.randn(1000, 128), torch.randn(128)
FORKS = """
import os, torch
from text_generation_server.kernels.cpu import load_kernels
kernels = load_kernels()
kernels.threads = 4
x, weight = torch.ones(1000, 128), torch.ones(128)
before = kernels.rms_norm(x, weight, 1.0).numpy().tobytes()
child = os.fork()
same = kernels.rms_norm(x, weight, 1.0).numpy().tobytes() == before  # torch.equal would hang: it uses OpenMP
if not child:
    os._exit(0 if same else 1)
assert same and os.waitpid(child, 0)[1] == 0
print("done")
"""


def compute(kernels: CpuKernels, threads: int) -> Tensor:
    return CpuKernels(kernels.library, threads).rms_norm(X, LONG_NORM, 1e-6)


def test_callers_of_several_threads_and_team_sizes_share_the_threads(kernels: CpuKernels) -> None:
    expected = compute(kernels, 1)

    def compute_often(threads: int) -> bool:
        return all(torch.equal(compute(kernels, 1 + (threads + i) % 5), expected) for i in range(200))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(compute_often, range(4)))


def test_waking_the_threads_changes_nothing_else(kernels: CpuKernels) -> None:
    expected = compute(kernels, 1)
    for threads in (1, 3, 2, 5, 2):
        kernels.library.wake()
        assert torch.equal(compute(kernels, threads), expected)
        kernels.library.wake()


def test_threads_without_work_sleep(kernels: CpuKernels) -> None:
    def rest() -> Seconds:
        compute(kernels, 4)
        kernels.library.wake()
        before = time.process_time()
        time.sleep(0.5)
        return Seconds(0.0, time.process_time() - before)

    # Threads that spin would take up to half a second each.
    assert_within(rest, cpu=0.05)


def test_threads_that_were_ended_are_gone_and_others_start_not_more_than_the_limit(
    kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compute(kernels, 1)
    kernels.library.end_team()
    before = len(os.listdir("/proc/self/task"))
    monkeypatch.setattr(kernels.library, "_max_threads", kernels.library._max_threads)  # as it is, afterwards
    for threads, most in (4, 5), (3, 3), (4, 2):
        kernels.library.limit_threads(most)
        assert torch.equal(compute(kernels, threads), expected)
        assert len(os.listdir("/proc/self/task")) == before + min(threads, most) - 1
        kernels.library.end_team()
        assert len(os.listdir("/proc/self/task")) == before


def test_a_fork_computes_with_threads_of_its_own_and_both_processes_end(kernels: CpuKernels) -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr
