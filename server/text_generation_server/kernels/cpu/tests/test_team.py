"""The threads that run the compiled kernels: they are started once, shared by all callers, and asleep between steps."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from text_generation_server.kernels.cpu import load_kernels
from text_generation_server.kernels.cpu.backend import CpuKernels

# Large enough for all threads.
X, NORM = torch.randn(1000, 128), torch.randn(128)
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


@pytest.fixture
def kernels() -> CpuKernels:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("needs a compiled library of CPU kernels")
    return kernels


def compute(kernels: CpuKernels, threads: int) -> Tensor:
    return CpuKernels(kernels.library, threads).rms_norm(X, NORM, 1e-6)


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
    compute(kernels, 4)
    kernels.library.wake()
    before = time.process_time()
    time.sleep(0.5)
    # Threads that spin would take up to half a second each.
    assert time.process_time() - before < 0.05


def test_a_fork_computes_with_threads_of_its_own_and_both_processes_end(kernels: CpuKernels) -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr
