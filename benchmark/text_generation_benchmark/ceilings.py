"""What this machine's cores reach together: how fast they read memory, and how fast they multiply matrices."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from text_generation_benchmark.load import LoadResult
from text_generation_benchmark.roofline import Ceilings
from text_generation_benchmark.workload import Run, Workload
from text_generation_common.cpu_features import processor_flags
from text_generation_common.flags.kinds import ActivationType
from text_generation_common.quantized.values import Dense, Groups, Int8, Weight
from text_generation_server.device.arena import empty
from text_generation_server.kernels.cpu import load_kernels

# Features of processors that decide how fast products and attention can be, as /proc/cpuinfo names them.
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16")
PASSES = 5
READ_NUMBERS = 2**28  # 1 GiB, far more than the caches hold
SIZE = 1024  # rows and columns of the matrices: the caches hold them, and each number is used often


class Meter:
    """Keeps what it measures with, so that a measurement takes a quarter of a second. `activations`: of products; with
    int8 they are of integers of 8 bits."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, activations: ActivationType = ActivationType.model) -> None:
        self._block = empty((READ_NUMBERS,), torch.float32, torch.device("cpu")).fill_(1)
        generator = torch.Generator().manual_seed(0)  # with zeros, some processors are faster
        numbers, x = (torch.randn(SIZE, SIZE, generator=generator).to(dtype) for _ in range(2))
        weight: Weight = Dense(numbers)
        torchs: Callable[[], Tensor] = partial(torch.matmul, x, numbers.T)
        if activations is ActivationType.int8:
            q, of_x = ((32 * each).clamp(-127, 127).to(torch.int8) for each in (numbers, x))
            weight = Int8(q, Groups(SIZE, torch.ones(SIZE, 1)))
            torchs = partial(torch._int_mm, of_x, q.T)
        self._products = [torchs]
        kernels = load_kernels(activations=activations)
        if (
            kernels is not None
            and (ours := kernels.linear(weight, None, gated=False, x_type=dtype, y_type=dtype)) is not None
        ):
            self._products.append(partial(ours, x))

    def measure(self) -> Ceilings:
        """The best of some passes over 1 GiB on huge pages; and of torch's products of square matrices and ours."""
        read = fastest(self._block.sum)
        multiply = min(map(fastest, self._products))
        return Ceilings(self._block.nbytes / read, 2 * SIZE**3 / multiply)


def fastest(act: Callable[[], object]) -> float:
    """The least seconds of some calls."""
    times = []
    for _ in range(PASSES):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return min(times)


def with_ceilings(run: Run, meter: Meter, measured: list[Ceilings]) -> Run:
    """Wraps `run` so that it also appends the machine's ceilings: the higher ones of two measurements, before and
    after."""

    def run_and_measure(workload: Workload) -> LoadResult:
        before = meter.measure()
        result = run(workload)
        measured.append(before.higher(meter.measure()))
        return result

    return run_and_measure


def machine(kernels: Iterable[str], measured: Sequence[Ceilings]) -> str:
    """The processor, what our server computed with, and the lowest and highest ceilings of a run, if there are any."""
    features = [feature for feature in FEATURES if feature in processor_flags()]
    said = f"bfloat16, {os.cpu_count()} cores with {', '.join(features) or 'none of the features that kernels use'}"
    said += f"; kernels: {', '.join(sorted(set(kernels)))}; torch {torch.__version__}"
    if measured:
        reads, products = [each.bandwidth / 1e9 for each in measured], [each.flops / 1e9 for each in measured]
        said += f"; memory reads {min(reads):.1f} to {max(reads):.1f} GB/s"
        said += f", products make {min(products):,.0f} to {max(products):,.0f} GFLOPS"
    return said
