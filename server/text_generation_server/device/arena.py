"""Makes large CPU tensors in separate mappings, on huge pages where the system gives them."""

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21
SHARED_BYTES = 16 * HUGE_PAGE
LINE = 64
MALLOC_GIVES_BACK = 32 << 20  # bytes; the C library gives the memory of such tensors back to the system


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like torch.empty. On a CPU, a tensor that fills at least one huge page lies on huge pages: weights and keys are
    then read at the speed of the memory, which address translation (page walks) would slow down. MemoryError if the
    system has no memory for it.
    """
    if not _has_own_mapping(shape, dtype, device):
        return torch.empty(shape, dtype=dtype, device=device)
    size = torch.Size(shape).numel() * dtype.itemsize
    # One page is added, so that the tensor can begin at the border of a huge page. The tensor keeps the mapping alive.
    length = -(-size // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
    try:
        pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
    except OSError as error:
        raise MemoryError(f"the system gives no {length >> 20} MiB of memory: {error.strerror}") from None
    with suppress(OSError):  # The kernel has no huge pages.
        pages.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(pages, dtype=torch.uint8)
    offset = -everything.data_ptr() % HUGE_PAGE
    return everything[offset : offset + size].view(dtype).view(shape)


class SharedPages:
    """Gives tensors parts of mappings that they share, so that small ones lie on huge pages too, and large ones take no
    more than their own. A mapping is kept as long as one of its tensors."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)  # what is left of the newest mapping

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Like `empty` on a CPU. The tensor begins at a cache line."""
        size = math.prod(shape) * dtype.itemsize
        taken = -(-size // LINE) * LINE
        if taken > len(self._left):
            self._left = empty((max(taken, SHARED_BYTES),), torch.uint8, torch.device("cpu"))
        tensor, self._left = self._left[:size], self._left[taken:]
        return tensor.view(dtype).view(shape)


def ask_for_huge_pages(new: Tensor) -> None:
    """Has the system give new memory of torch's on a CPU a huge page at a time, where the C library takes it from the
    system anew each time. Small pages can take longer than what is computed in them."""
    if new.nbytes < MALLOC_GIVES_BACK or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    start = -(-new.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (new.data_ptr() + new.nbytes) // HUGE_PAGE * HUGE_PAGE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like `empty`, with zeros. The system maps pages of zeros to one shared page until they are written."""
    tensor = empty(shape, dtype, device)
    return tensor if _has_own_mapping(shape, dtype, device) else tensor.zero_()


def take_memory(zeros: Tensor) -> None:
    """Writes every page of new zeros on a CPU, so that a lack of memory is noticed now."""
    if zeros.device.type == "cpu":
        zeros.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].zero_()


def take_in_pieces(tensors: Sequence[Tensor], before: Callable[[Tensor], None] = lambda piece: None) -> Iterator[None]:
    """Has the system give the memory of tensors on a CPU, whose content stays: one huge page of each tensor at a time,
    from their beginnings on. `before` is called with the bytes of each piece first."""
    parts = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.device.type == "cpu"]
    for at in range(0, max(map(len, parts), default=0), HUGE_PAGE):
        for part in parts:
            if at < len(part):
                with torch.inference_mode():
                    before(part[at : at + HUGE_PAGE])
                    part[at : at + HUGE_PAGE : mmap.PAGESIZE].add_(0)
                yield


def give_back() -> None:
    """Gives freed memory back to the system. glibc alone keeps as much as the largest tensors that were freed, and all
    that lies below the newest one."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # other C libraries have none
        trim(0)


def _has_own_mapping(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    is_large = torch.Size(shape).numel() * dtype.itemsize >= HUGE_PAGE
    return device.type == "cpu" and is_large and hasattr(mmap, "MADV_HUGEPAGE")
