"""Fixtures of the checks. Without a GPU, Triton's kernels run in its interpreter, which reads a variable when triton is
imported.
"""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from gpu_check.device import DEVICE, DTYPE, GPU, Measured, seconds_per_call

from text_generation_benchmark.roofline import Ceilings
from text_generation_server.kernels.tests.quick_interpreter import quicken

if not GPU:
    quicken()


@pytest.fixture(autouse=True)
def as_in_a_shard() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measured:
    """Adds a line to a table of the results. The line is kept if the test fails later."""

    def record(table: str, cells: dict[str, str], **figures: float) -> None:
        record_property(table, {"cells": cells, "figures": figures})

    return record


@pytest.fixture(scope="session")
def ceilings() -> Ceilings:
    """The device's, measured with plain torch: the faster of reading and copying, and a large matrix product."""
    block = torch.ones(2 << 30 if GPU else 4 << 20, device=DEVICE)
    other, rows = torch.empty_like(block), block.view(-1, 1 << 15)
    read, copied = seconds_per_call([lambda: rows.sum(dim=1)]), seconds_per_call([lambda: other.copy_(block)])
    side = 8192 if GPU else 256
    a, b = (torch.randn(side, side, device=DEVICE).to(DTYPE) for _ in range(2))
    product = seconds_per_call([lambda: a @ b])
    return Ceilings(block.nbytes * max(1 / read, 2 / copied), 2 * side**3 / product)
