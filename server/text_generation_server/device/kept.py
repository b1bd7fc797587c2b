"""Memory that outlives a shard: its template makes it, and each shard that the template forks maps it.

Where `shmem_enabled` is `never`, as on most systems, the kernel gives shared memory no huge pages by itself.
MADV_COLLAPSE makes huge pages whatever that setting is, from Linux 6.1 on, unless it is `deny`.
"""

import ctypes
import errno
import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from text_generation_server.device.arena import HUGE_PAGE, LINE, SHARED_BYTES, take_in_pieces

MADV_COLLAPSE = 25
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
PROT_NONE = 0
FAILED = ctypes.c_void_p(-1).value
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class KeptMemory:
    """A file in memory, in which tensors are made. Processes that have this object by a fork, and make tensors of the
    same shapes in the same order, get the same memory."""

    def __init__(self, name: str = "tgi-keys") -> None:
        """`name`: what /proc shows."""
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC)
        # The names of the content, the newest first. Shared by all these processes.
        self._names = (ctypes.c_uint64 * 2).from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
        self._size = 0  # bytes that tensors of this process take
        self.can_collapse = True  # False once the kernel has refused to make huge pages

    def close(self) -> None:
        """Tensors stay."""
        os.close(self._fd)

    @property
    def content(self) -> int:
        """The name of what is in the memory. 0: nothing that another process may read."""
        return self._names[0]

    def rename(self, name: int, old: int = 0) -> None:
        """Gives the content a name, beside the one of its names that it keeps."""
        self._names[1] = old  # first: a process that is killed here leaves no name of other content
        self._names[0] = name

    def has(self, name: int) -> bool:
        """Whether the content has this name."""
        return name != 0 and name in tuple(self._names)

    def begin(self, again: bool) -> None:
        """The next tensor is the first one, with what is in the memory. Unless `again`, the memory is given back, and
        tensors have zeros: no tensor of before may be there any more."""
        self._size = 0
        if not again:
            self.rename(0)
            os.ftruncate(self._fd, 0)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor with zeros, or with what an earlier process has left. MemoryError if the system has no memory for
        it. It begins where a huge page does."""
        assert device.type == "cpu"
        size = math.prod(shape) * dtype.itemsize
        length = -(-size // HUGE_PAGE) * HUGE_PAGE
        try:
            if os.fstat(self._fd).st_size < self._size + length:
                os.ftruncate(self._fd, self._size + length)
            pages = _mapped(self._fd, self._size, length)
        except OSError as error:
            raise MemoryError(f"the system gives no {length >> 20} MiB of memory: {error.strerror}") from None
        self._size += length
        return torch.frombuffer(pages, dtype=torch.uint8)[:size].view(dtype).view(shape)

    def take(self, part: Tensor) -> None:
        """Has the system give the memory of a part of a tensor, whose content stays."""
        for _ in self.take_in_pieces([part]):
            pass

    def take_in_pieces(self, parts: Sequence[Tensor]) -> Iterator[None]:
        """The same for parts of tensors, a huge page of each at a time."""
        return take_in_pieces(parts, self._collapse)

    def _collapse(self, piece: Tensor) -> None:
        """Makes huge pages of the memory around `piece`: of one that is not taken, if it has a page."""
        if not self.can_collapse:
            return
        start = piece.data_ptr() // HUGE_PAGE * HUGE_PAGE
        piece[:1].add_(0)
        for at in range(start, piece.data_ptr() + len(piece), HUGE_PAGE):
            if at > piece.data_ptr():
                piece[at - piece.data_ptr()].add_(0)
            if _libc().madvise(at, HUGE_PAGE, MADV_COLLAPSE) and ctypes.get_errno() == errno.EINVAL:
                self.can_collapse = False  # An older kernel; after other errors the next huge page may be made.


def memory_for_keys() -> KeptMemory | None:
    """None where a shard's own memory is faster: it has huge pages, and this memory would not get any."""
    memory = KeptMemory()
    memory.take(memory.tensor((1,), torch.uint8, torch.device("cpu")))
    memory.begin(again=False)
    if memory.can_collapse or not _gives_huge_pages():
        return memory
    memory.close()
    return None


def _gives_huge_pages() -> bool:
    """Whether the system gives huge pages to memory of a single process."""
    try:
        return "[never]" not in ENABLED.read_text()
    except OSError:
        return False


class SmallKept:
    """Tensors in a KeptMemory that lie beside each other, for those that are smaller than a huge page."""

    def __init__(self, kept: KeptMemory) -> None:
        self._kept = kept
        self._left = torch.empty(0, dtype=torch.uint8)  # what is left of the newest piece

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that begins at a cache line."""
        size = math.prod(shape) * dtype.itemsize
        taken = -(-size // LINE) * LINE
        if taken > len(self._left):
            self._left = self._kept.tensor((max(taken, SHARED_BYTES),), torch.uint8, device)
        tensor, self._left = self._left[:size], self._left[taken:]
        return tensor.view(dtype).view(shape)


def _mapped(fd: int, start: int, length: int) -> "ctypes.Array[ctypes.c_uint8]":
    """Bytes `start` to `start + length` of a file, at the beginning of a huge page, as long as the result lives."""
    libc, own = _libc(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    reserved = _checked(libc.mmap(None, length + HUGE_PAGE, PROT_NONE, own, fd=-1, offset=0))
    at = -(-reserved // HUGE_PAGE) * HUGE_PAGE
    if at > reserved:
        libc.munmap(reserved, at - reserved)
    if rest := reserved + HUGE_PAGE - at:
        libc.munmap(at + length, rest)
    both, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
    _checked(libc.mmap(at, length, both, shared, fd=fd, offset=start))
    pages = (ctypes.c_uint8 * length).from_address(at)
    weakref.finalize(pages, libc.munmap, at, length).atexit = False  # threads may compute until the end
    return pages


def _checked(address: int) -> int:
    if address == FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


@dataclass(frozen=True, slots=True)
class MappingCalls:
    """Functions of the C library that Python's mmap has not, or not with all arguments."""

    mmap: Callable[..., int]
    munmap: Callable[[int, int], int]
    madvise: Callable[[int, int, int], int]


@cache
def _libc() -> MappingCalls:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    arguments = dict(address=address, length=size, protection=number, flags=number, fd=number, offset=ctypes.c_int64)
    prototype = ctypes.CFUNCTYPE(address, *arguments.values(), use_errno=True)
    libc.munmap.argtypes, libc.madvise.argtypes = [address, size], [address, size, number]
    by_name = prototype(("mmap", libc), tuple((1, name) for name in arguments))
    return MappingCalls(by_name, libc.munmap, libc.madvise)
