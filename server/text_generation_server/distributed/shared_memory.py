"""Collectives between processes of one host, through memory that all of them map. A collective takes microseconds,
where gloo takes milliseconds.

Collectives are numbered. Each rank writes its part into its slab (its area of the memory), publishes the number, waits
until every rank has published the number, and reads all slabs. Each rank has two slabs, for even and odd numbers. Two
are enough: a rank that writes number n + 2 has seen all ranks publish n + 1, and a rank publishes n + 1 only after it
has read n. A header beside each slab describes its content. If ranks are not at the same collective, the headers differ
and an error is raised.
"""

import logging
import mmap
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from text_generation_server.distributed.process_group import sum_in_order
from text_generation_server.errors import GroupBroken

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("text_generation_server")

SLAB_BYTES = 1 << 20  # bytes of a slab; larger tensors are exchanged in pieces
LINE_WORDS = 16  # words of 8 bytes; two cache lines, which the hardware fetches together
PAGE_BYTES = 4096
# Seconds to wait without sleeping. Ranks that compute the same step usually differ by less.
SPIN_S = 0.002
# Seconds of each sleep after that. The other rank is then idle, stopped or dead, so other threads may have the core.
NAP_S = 0.0005

KINDS = ("all_reduce", "gather", "broadcast")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)


class SharedMemory:
    """One rank's view of the mapping. It consists of a line with a nonce (a random number), one line for the counter of
    each rank, the headers of the slabs (number, kind, type, length), the even slabs of all ranks, and the odd slabs of
    all ranks.
    """

    def __init__(self, rank: int, size: int, mapping: mmap.mmap, wait_s: float) -> None:
        self._rank = rank
        self._size = size
        self._mapping = mapping
        self._wait_s = wait_s
        self._number = 0
        # Reading or writing a word of this view is one machine instruction on 8 aligned bytes.
        self._words = memoryview(mapping).cast("q")
        self._counters = [(1 + r) * LINE_WORDS for r in range(size)]
        self._headers = [[(1 + (1 + turn) * size + r) * LINE_WORDS for r in range(size)] for turn in (0, 1)]
        self._slabs = {dtype: self._view(dtype) for dtype in DTYPES}

    def all_reduce(self, x: Tensor) -> None:
        for piece in _pieces(x):
            sum_in_order(self._exchange(0, piece), out=piece)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        whole = [torch.empty_like(x) for _ in range(self._size)] if self._rank == 0 else []
        for piece, *targets in zip(*map(_pieces, [x, *whole]), strict=True):
            for target, part in zip(targets, self._exchange(1, piece), strict=False):
                target.copy_(part)
        return whole or None

    def broadcast(self, x: Tensor) -> None:
        for piece in _pieces(x):
            first = self._exchange(2, piece)[0]
            if self._rank:
                piece.copy_(first)

    def close(self) -> None:
        """Unmaps the memory, which is freed when the last process has unmapped it."""

    def _exchange(self, kind: int, piece: Tensor) -> list[Tensor]:
        """Returns the pieces of all ranks, as views of the shared memory. They are valid until the next call."""
        self._number += 1
        turn, count, words = self._number & 1, piece.numel(), self._words
        slabs = self._slabs[piece.dtype][turn]
        slabs[self._rank][:count].copy_(piece)
        own = (self._number, kind, DTYPES.index(piece.dtype), count)
        header = self._headers[turn][self._rank]
        words[header], words[header + 1], words[header + 2], words[header + 3] = own
        # x86-64 keeps the order of stores and the order of loads: a rank that sees the number also sees all that was
        # written before it. Other processors would need memory fences here and below, which Python does not have.
        words[self._counters[self._rank]] = self._number
        for rank in range(self._size):
            if words[self._counters[rank]] < self._number:
                self._wait_for(rank)
            header = self._headers[turn][rank]
            other = (words[header], words[header + 1], words[header + 2], words[header + 3])
            if other != own:
                raise GroupBroken(f"rank {rank} is at {_describe(other)}, but rank {self._rank} at {_describe(own)}")
        return [slab[:count] for slab in slabs]

    def _wait_for(self, rank: int) -> None:
        words, counter, number = self._words, self._counters[rank], self._number
        started = time.monotonic()
        while words[counter] < number:
            # Yields, because the rank that is waited for may need this core.
            os.sched_yield()
            waited = time.monotonic() - started
            if waited > SPIN_S:
                time.sleep(NAP_S)
            if waited > self._wait_s:
                raise GroupBroken(f"rank {rank} did not come to collective {number} within {self._wait_s:.0f} s")

    def _view(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """The slabs as tensors of `dtype`, by parity of the collective's number and by rank."""
        first, count = _slabs_offset(self._size), SLAB_BYTES // dtype.itemsize
        return [
            [
                torch.frombuffer(
                    self._mapping, dtype=dtype, count=count, offset=first + (turn * self._size + rank) * SLAB_BYTES
                )
                for rank in range(self._size)
            ]
            for turn in (0, 1)
        ]


def _pieces(x: Tensor) -> Iterable[Tensor]:
    """Splits x, which must be contiguous, into flat parts, each of which fits into a slab."""
    flat, limit = x.view(-1), SLAB_BYTES // x.itemsize
    return (flat,) if flat.numel() <= limit else torch.split(flat, limit)


def _describe(header: tuple[int, int, int, int]) -> str:
    number, kind, dtype, count = header
    return f"collective {number} ({KINDS[kind]} of {count} {str(DTYPES[dtype]).removeprefix('torch.')})"


def _slabs_offset(size: int) -> int:
    lines = 1 + 3 * size
    return -(-lines * LINE_WORDS * 8 // PAGE_BYTES) * PAGE_BYTES


def map_together(rank: int, size: int, store: "Store") -> mmap.mmap | None:
    """Memory that all ranks have mapped, or None on all ranks if one rank could not map it.

    Rank 0 makes the memory without a name, so it is freed however the processes end. The other ranks open it through
    rank 0's folder in /proc.
    """
    memory_fd = -1
    if rank == 0:
        memory_fd, address = _make_memory(size)
        store.set("memory", address)
    mapping = _map(store.get("memory").decode(), size)
    store.set(f"mapped-{rank}", str(mapping is not None))
    all_mapped = all([store.get(f"mapped-{r}") == b"True" for r in range(size)])
    if memory_fd >= 0:
        os.close(memory_fd)
    return mapping if all_mapped else None


def _make_memory(size: int) -> tuple[int, str]:
    """Makes shared memory. Returns its descriptor, and for the other ranks a path and a nonce (a random number). On
    failure: -1 and "".
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return -1, ""
    try:
        fd = os.memfd_create("text-generation-shards")
        os.ftruncate(fd, _slabs_offset(size) + 2 * size * SLAB_BYTES)
        nonce = secrets.randbits(62)
        os.pwrite(fd, nonce.to_bytes(8, "little"), 0)
    except OSError as error:
        logger.info("no memory to share with the other ranks: %s", error)
        return -1, ""
    return fd, f"/proc/{os.getpid()}/fd/{fd} {nonce}"


def _map(address: str, size: int) -> mmap.mmap | None:
    if not address:
        return None
    path, _, nonce = address.partition(" ")
    try:
        with open(path, "r+b", buffering=0) as file:
            mapping = mmap.mmap(file.fileno(), _slabs_offset(size) + 2 * size * SLAB_BYTES)
    except (OSError, ValueError) as error:
        logger.info("the memory of rank 0 cannot be shared: %s", error)
        return None
    # The nonce is compared, because the path leads to another file if ranks have separate process namespaces.
    return mapping if int.from_bytes(mapping[:8], "little") == int(nonce) else None
