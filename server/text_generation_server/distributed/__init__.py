"""The ranks of a shard group, and how they add up tensors, pass them on, and agree on what went wrong.

Every collective is entered by all ranks in the same order. Where this would not come true any more, GroupBroken says
so: its process has to exit, because the others may be waiting for it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from text_generation_server.errors import GroupBroken, MemoryLimitError, ShardError, StepError

log = logging.getLogger("text_generation_server")

JOIN_S = 60.0  # until all ranks have come
# In a collective a peer is never so late. It is a dead one's end: the launcher, which sees it die, is much faster.
WAIT_S = 300.0
# The kinds of errors that keep their kind on the ranks that only hear of them. The first stands for all others, too.
TOLD_KINDS: tuple[type[ShardError], ...] = (StepError, MemoryLimitError)


class Transport(Protocol):
    """How contiguous tensors travel. All ranks call the same function with the same shape and type."""

    def all_reduce(self, x: Tensor) -> None:
        """x becomes the sum over all ranks, the same bits everywhere."""
        ...

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Rank 0: the x of every rank, in their order. The others: None."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """x becomes rank 0's."""
        ...

    def close(self) -> None: ...


class Alone:
    """A group of one: nothing travels."""

    def all_reduce(self, x: Tensor) -> None:
        pass

    def gather(self, x: Tensor) -> list[Tensor] | None:
        return [x]

    def broadcast(self, x: Tensor) -> None:
        pass

    def close(self) -> None:
        pass


class Group:
    """This process's place among the ranks. Not thread-safe: everything is called by the worker's one thread.

    Numbers that hosts agree on travel by `control`, as tensors of the CPU: nobody waits for a GPU to learn them.
    """

    def __init__(self, rank: int, size: int, transport: Transport, control: Transport | None = None) -> None:
        self.rank = rank
        self.size = size
        self._transport = transport
        self._control = control or transport

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        self._transport.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        return self._transport.gather(x)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values, in place."""
        self._transport.broadcast(x)
        return x

    def exchange(self, value: int) -> list[int]:
        """The value of every rank."""
        values = torch.zeros(self.size, dtype=torch.int64)
        values[self.rank] = value
        self._control.all_reduce(values)
        told: list[int] = values.tolist()
        return told

    def all_agree(self, yes: bool) -> bool:
        """Whether all ranks say yes."""
        return all(self.exchange(int(yes))) if self.size > 1 else yes

    @contextmanager
    def agreement(self, what: str) -> Iterator[None]:
        """Inside is what may fail on one rank alone, without collectives. If it fails on any, it raises on all: the
        rank's own error there, elsewhere one of its kind that names the rank. Nothing is owed afterwards."""
        try:
            yield
        except Exception as error:
            self._tell(error)
            raise
        for rank, told in enumerate(self._tell(None)):
            if told:
                raise TOLD_KINDS[told - 1](f"rank {rank} of {self.size} could not {what}: its log says why")

    def _tell(self, error: Exception | None) -> list[int]:
        """What every rank has to say: 0, or the number of its error's kind."""
        if self.size == 1:
            return []
        kinds = [n for n, kind in enumerate(TOLD_KINDS, start=1) if isinstance(error, kind)]
        with self.owing("an agreement"):
            return self.exchange(0 if error is None else max(kinds, default=1))

    @contextmanager
    def owing(self, what: str) -> Iterator[None]:
        """Inside are collectives: a rank that raises leaves the others waiting, so that any error means GroupBroken.
        A group of one owes nothing."""
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
        """Leaves the group in peace. A process that exits without is fine where nobody waits for it."""
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
    """Waits for the other ranks, which name the same `rendezvous`: a file that this start of the group makes.

    GPUs talk through NCCL, processes on the CPUs of one host through shared memory; where they have none, or shall not
    (`share_memory`), through gloo. GroupBroken if not all ranks come within `join_s`. With shared memory the file is
    gone afterwards, otherwise it serves as long as the group lasts.
    """
    if size == 1:
        return Group(rank, size, Alone())
    try:
        return Group(rank, size, *_connect(rank, size, device, rendezvous, share_memory, join_s, wait_s))
    except RuntimeError as error:  # torch's stores and process groups raise it, and subclasses of it
        reason = str(error).partition("\n")[0]
        raise GroupBroken(f"rank {rank} of {size} could not join its group within {join_s:.0f} s: {reason}") from error


def _connect(
    rank: int, size: int, device: torch.device, rendezvous: Path, share_memory: bool, join_s: float, wait_s: float
) -> tuple[Transport, Transport]:
    """For tensors of the device, and for those of the CPU."""
    # Takes a while to import, and a group of one needs none of it.
    import torch.distributed as dist

    from text_generation_server.distributed.process_group import Gloo, Nccl
    from text_generation_server.distributed.shared_memory import SharedMemory, map_together

    store = dist.FileStore(str(rendezvous), size)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=join_s))
    mapping = map_together(rank, size, store) if share_memory else None
    if mapping is None:
        log.info("the %d ranks share no memory: they talk through gloo, which is slower", size)
    shared = None if mapping is None else SharedMemory(rank, size, mapping, wait_s)
    if device.type == "cuda":
        gpus = Nccl(rank, size, store, device, wait_s)
        return gpus, shared or gpus
    if shared is None:
        gloo = Gloo(rank, size, store, wait_s)
        return gloo, gloo
    # The file is needed no more once nobody has a store, whose end still writes to it.
    del store
    shared.broadcast(torch.zeros(1))
    if rank == 0:
        rendezvous.unlink(missing_ok=True)
    return shared, shared
