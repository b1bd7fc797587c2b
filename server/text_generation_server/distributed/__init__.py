"""The ranks of a shard group: they add up tensors, exchange values, and agree on errors.

All ranks enter all collectives in the same order. A rank that can no longer do this raises GroupBroken: its process
must exit, because the other ranks may be waiting for it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from text_generation_common.errors import MemoryLimitError, ShardError
from text_generation_server.errors import GroupBroken, StepError

logger = logging.getLogger("text_generation_server")

JOIN_S = 60.0  # Seconds that all ranks get to join the group.
# Seconds after which a collective fails. No living rank is ever this late, and the launcher replaces a group that has a
# dead rank much sooner.
WAIT_S = 300.0
# Classes of errors that the other ranks raise as well when one rank raises them. If a rank fails with any other error,
# the other ranks raise the first class.
SHARED_ERRORS: tuple[type[ShardError], ...] = (StepError, MemoryLimitError)


class Transport(Protocol):
    """Moves contiguous tensors between ranks. All ranks call the same function with the same shape and type."""

    def all_reduce(self, x: Tensor) -> None:
        """Replaces x by the sum over all ranks, which has the same bits on every rank."""
        ...

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """On rank 0, the x of every rank, in the order of ranks. On other ranks None."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Replaces x by the x of rank 0."""
        ...

    def close(self) -> None: ...


class Alone:
    """The transport of a group of one rank, which moves nothing."""

    def all_reduce(self, x: Tensor) -> None:
        pass

    def gather(self, x: Tensor) -> list[Tensor] | None:
        return [x]

    def broadcast(self, x: Tensor) -> None:
        pass

    def close(self) -> None:
        pass


class Group:
    """This process's rank and its connections to the other ranks. Not thread-safe: the worker's thread makes all calls.

    Numbers that the processes agree on travel through `control`, as CPU tensors, so that no process waits for a GPU.
    """

    def __init__(self, rank: int, size: int, transport: Transport, control: Transport | None = None) -> None:
        self.rank = rank
        self.size = size
        self._transport = transport
        self._control = control or transport

    def join(self, joined: "Group") -> None:
        """Takes the connections of `joined`. Objects that hold this group, which had none, then use them."""
        self._transport, self._control = joined._transport, joined._control

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replaces x by the sum over all ranks, and returns it."""
        self._transport.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        return self._transport.gather(x)

    def broadcast(self, x: Tensor) -> Tensor:
        """Replaces x by the x of rank 0, and returns it."""
        self._transport.broadcast(x)
        return x

    def exchange(self, value: int) -> list[int]:
        """The values of all ranks, in the order of ranks."""
        values = torch.zeros(self.size, dtype=torch.int64)
        values[self.rank] = value
        self._control.all_reduce(values)
        of_all: list[int] = values.tolist()
        return of_all

    def all_agree(self, yes: bool) -> bool:
        """Whether `yes` is true on all ranks."""
        return all(self.exchange(int(yes))) if self.size > 1 else yes

    @contextmanager
    def agreement(self, what: str) -> Iterator[None]:
        """A context for local work that contains no collective. If the work fails on one rank, all ranks raise: that
        rank its own error, the others an error of the same class that names the rank. The ranks stay in step."""
        try:
            yield
        except Exception as error:
            self._exchange_errors(error)
            raise
        for rank, number in enumerate(self._exchange_errors(None)):
            if number:
                raise SHARED_ERRORS[number - 1](f"rank {rank} of {self.size} could not {what}: its log says why")

    def _exchange_errors(self, error: Exception | None) -> list[int]:
        """One number for each rank: 0 without an error, otherwise the place of the error's class in SHARED_ERRORS,
        counted from 1.
        """
        if self.size == 1:
            return []
        numbers = [n for n, kind in enumerate(SHARED_ERRORS, start=1) if isinstance(error, kind)]
        with self.collective_work("an agreement"):
            return self.exchange(0 if error is None else max(numbers, default=1))

    @contextmanager
    def collective_work(self, what: str) -> Iterator[None]:
        """A context for work with collectives. A rank that fails leaves the other ranks waiting, so any error becomes
        GroupBroken, except in a group of one rank."""
        try:
            yield
        except GroupBroken:
            raise
        except Exception as error:
            if self.size == 1:
                raise
            reason = f"{type(error).__name__}: {error}"
            raise GroupBroken(f"rank {self.rank} of {self.size} failed inside {what}: {reason}") from error

    def close(self) -> None:
        """Leaves the group. A process may also exit without this call if no rank waits for it."""
        self._transport.close()


def join_group(
    rank: int,
    size: int,
    device: torch.device,
    rendezvous: Path,
    share_memory: bool = True,
    join_s: float = JOIN_S,
    wait_s: float = WAIT_S,
) -> Group:
    """Joins the group, and waits for the other ranks, which pass the same `rendezvous`: a file that is made anew at
    each start of the group.

    GPUs use NCCL. Processes on CPUs of one host use shared memory, or gloo if there is no shared memory or
    `share_memory` is false. GroupBroken if not all ranks join within `join_s` seconds. With shared memory the file is
    removed afterwards; otherwise the group uses it until its end.
    """
    if size == 1:
        return Group(rank, size, Alone())
    try:
        return Group(
            rank,
            size,
            *_connect(
                rank, size, device, rendezvous=rendezvous, share_memory=share_memory, join_s=join_s, wait_s=wait_s
            ),
        )
    except RuntimeError as error:  # torch's stores and process groups raise RuntimeError and its subclasses
        reason = str(error).partition("\n")[0]
        raise GroupBroken(f"rank {rank} of {size} could not join its group within {join_s:.0f} s: {reason}") from error


def unjoined(rank: int, size: int) -> Group:
    """A group for loading, which exchanges nothing. It must `join` before any work of the group."""
    return Group(rank, size, Alone())


def prepare_to_join(size: int) -> None:
    """Imports what joining a group of `size` ranks would have to import."""
    if size > 1:
        import torch.distributed  # noqa: F401

        import text_generation_server.distributed.shared_memory  # noqa: F401


def _connect(
    rank: int, size: int, device: torch.device, rendezvous: Path, share_memory: bool, join_s: float, wait_s: float
) -> tuple[Transport, Transport]:
    """The transports for tensors of the device and for CPU tensors."""
    # Imported here, because the import is slow and a group of one rank does not need it.
    import torch.distributed as dist

    from text_generation_server.distributed.process_group import Gloo, Nccl
    from text_generation_server.distributed.shared_memory import SharedMemory, map_together

    store = dist.FileStore(str(rendezvous), size)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=join_s))
    mapping = map_together(rank, size, store) if share_memory else None
    if mapping is None:
        logger.info("the %d ranks share no memory: they talk through gloo, which is slower", size)
    shared = None if mapping is None else SharedMemory(rank, size, mapping, wait_s)
    if device.type == "cuda":
        gpus = Nccl(rank, size, store, device, wait_s)
        return gpus, shared or gpus
    if shared is None:
        gloo = Gloo(rank, size, store, wait_s)
        return gloo, gloo
    # The file can be removed once no rank has a store any more: a store writes to the file when it is deleted.
    del store
    shared.broadcast(torch.zeros(1))
    if rank == 0:
        rendezvous.unlink(missing_ok=True)
    return shared, shared
