"""The ceilings (measured upper bounds) of the device: bytes per second read and copied, operations per second of a
large matrix product.

Measured with plain torch, not with our kernels. The memory's ceiling is the faster of reading and copying.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from gpu_check.findings import Case, Context, Measured
from gpu_check.timing import seconds_per_call

TABLE = "Ceilings, measured in this run"
MEMORY, MATRIX = "memory_bytes_per_s", "matrix_flops_per_s"


def measure(context: Context) -> Iterator[Case]:
    def memory() -> Iterable[Measured]:
        block = torch.ones(2 << 30 if context.on_gpu else 4 << 20, device=context.device)
        reading, copying = _read(block), _copy(block)
        yield _memory("read (a sum)", reading)
        yield _memory("copy, bytes read and written", copying)
        yield _memory("the memory's ceiling", max(reading, copying), MEMORY)

    def matrix() -> Iterable[Measured]:
        side = 8192 if context.on_gpu else 256
        flops = _product(side, context.device)
        cells = {"what": f"bfloat16 product of {side}³, random numbers", "rate": f"{flops / 1e12:.2f} TFLOP/s"}
        yield Measured(cells, {MATRIX: flops})

    yield Case(TABLE, {"of": "memory"}, memory)
    yield Case(TABLE, {"of": "matrix"}, matrix)


def _read(block: Tensor) -> float:
    """Bytes per second that reading `block` reaches."""
    rows = block.view(-1, 1 << 15)
    return block.nbytes / min(
        seconds_per_call([call], block.device) for call in (lambda: block.sum(), lambda: rows.sum(dim=1))
    )


def _copy(block: Tensor) -> float:
    other = torch.empty_like(block)
    return 2 * block.nbytes / seconds_per_call([lambda: other.copy_(block)], block.device)


def _product(side: int, device: torch.device) -> float:
    """Operations per second of a matrix product of this side length."""
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    return 2 * side**3 / seconds_per_call([lambda: a @ b], device)


def _memory(what: str, rate: float, figure: str = "") -> Measured:
    return Measured({"what": what, "rate": f"{rate / 1e9:.1f} GB/s"}, {figure: rate} if figure else {})
