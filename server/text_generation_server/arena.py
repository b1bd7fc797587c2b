"""Large CPU tensors in memory of their own, on huge pages where the system gives them."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty; on a CPU, what fills a huge page lies on huge pages: weights and keys are then read at the memory's
    speed, not at that of page walks."""
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    if device.type != "cpu" or size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    # One page more, so that the tensor can begin where a huge page does. The tensor keeps the mapping alive.
    length = -(-size // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(pages, dtype=torch.uint8)
    offset = -everything.data_ptr() % HUGE_PAGE
    return everything[offset : offset + size].view(dtype).view(shape)
