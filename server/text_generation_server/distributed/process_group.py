"""Collectives through torch.distributed: NCCL between GPUs, gloo between CPUs that share no memory."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class ProcessGroup:
    """The methods that gloo and NCCL have in common."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def gather(self, x: Tensor) -> list[Tensor] | None:
        parts = [torch.empty_like(x) for _ in range(self._size)] if self._rank == 0 else None
        dist.gather(x, parts, dst=0)
        return parts

    def broadcast(self, x: Tensor) -> None:
        dist.broadcast(x, src=0)

    def close(self) -> None:
        dist.destroy_process_group()


class Nccl(ProcessGroup):
    """A transport that uses NCCL for tensors of GPUs, and gloo for CPU tensors."""

    def __init__(self, rank: int, size: int, store: "Store", device: torch.device, wait_s: float) -> None:
        super().__init__(rank, size)
        _listen_to_this_host_only()
        wait, backends = timedelta(seconds=wait_s), "cpu:gloo,cuda:nccl"
        dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=wait, device_id=device)

    def all_reduce(self, x: Tensor) -> None:
        dist.all_reduce(x)


class Gloo(ProcessGroup):
    def __init__(self, rank: int, size: int, store: "Store", wait_s: float) -> None:
        super().__init__(rank, size)
        _listen_to_this_host_only()
        wait = timedelta(seconds=wait_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
        # The barrier is needed because a rank that left before the others are connected would break their start.
        dist.barrier()

    def all_reduce(self, x: Tensor) -> None:
        """Replaces x by the sum. Every rank adds the parts itself, because the order in which gloo adds depends on a
        row's place in the batch.
        """
        parts = [torch.empty_like(x) for _ in range(self._size)]
        dist.all_gather(parts, x)
        sum_in_order(parts, out=x)


def _listen_to_this_host_only() -> None:
    """Makes gloo listen on the loopback only, because all ranks are on this host. Gloo has no other option for this."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def sum_in_order(parts: list[Tensor], out: Tensor) -> None:
    """out = parts[0] + parts[1] + …, from left to right: every rank that computes the sum gets the same bits.
    Half-precision numbers are summed in float32 and rounded once.

    `out` must not be one of the parts.
    """
    if out.dtype not in (torch.bfloat16, torch.float16):
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out += part
        return
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    out.copy_(total)
