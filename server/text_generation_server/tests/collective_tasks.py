"""Functions that the ranks of test_distributed.py run. They return hashes and short lists, which are sent through
pipes."""

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import torch

from text_generation_server.distributed import Group, join_group

LISTENING = "0A"  # the state of a listening socket in /proc/net/tcp


def noise(rank: int, count: int, dtype: str) -> torch.Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    return (values * 100).to(getattr(torch, dtype))


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.view(torch.uint8).numpy().tobytes()).hexdigest()


def reduce_noise(group: Group, count: int, dtype: str) -> str:
    return digest(group.all_reduce(noise(group.rank, count, dtype)))


def gather_noise(group: Group, count: int, dtype: str) -> list[str]:
    return [digest(part) for part in group.gather(noise(group.rank, count, dtype)) or []]


def broadcast_noise(group: Group, count: int, dtype: str) -> str:
    return digest(group.broadcast(noise(group.rank, count, dtype)))


def many_collectives(group: Group, rounds: int) -> int:
    """Number of collectives with a wrong result. The collectives come in mixed order, and some ranks enter late."""
    wrong, ranks = 0, range(group.size)
    for i in range(rounds):
        if i % 50 == 10 * group.rank:
            time.sleep(0.003)
        wrong += group.all_reduce(torch.full((5,), i + group.rank)).tolist() != [sum(i + r for r in ranks)] * 5
        wrong += group.exchange(i * 10 + group.rank) != [i * 10 + r for r in ranks]
        wrong += int(group.broadcast(torch.tensor([i * 3 + group.rank]))) != i * 3
        parts = group.gather(torch.tensor([i, group.rank]))
        wrong += parts is not None and [part.tolist() for part in parts] != [[i, r] for r in ranks]
    return wrong


def lose_step(group: Group, what: str) -> str:
    """The error when rank 1 calls another collective than the other ranks."""
    differs = group.rank == 1
    x = torch.zeros(9 if differs and what == "length" else 8)
    if differs and what == "type":
        x = x.to(torch.bfloat16)
    return error_of(lambda: (group.broadcast if differs and what == "kind" else group.all_reduce)(x))


def stay_away(group: Group) -> str:
    """The error when rank 1 does not enter a collective."""
    return "" if group.rank == 1 else error_of(lambda: group.all_reduce(torch.zeros(8)))


def agree(group: Group, failing: dict[int, Exception]) -> tuple[str, float]:
    """The error of an agreement in which the ranks `failing` fail, and the sum of ones that the group computes
    afterwards."""

    def prepare() -> None:
        with group.agreement("prepare the step"):
            if group.rank in failing:
                raise failing[group.rank]

    return error_of(prepare), float(group.all_reduce(torch.ones(1)))


def owe(group: Group) -> str:
    def fail() -> None:
        with group.collective_work("a step"):
            raise ArithmeticError("overflow")

    return error_of(fail)


def listening_addresses(group: Group) -> list[str]:
    """Addresses of the TCP sockets on which this process listens, in the kernel's notation."""
    own = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    group.exchange(0)  # exchanged so that no rank leaves before all ranks have read their addresses
    return found


def transport(group: Group) -> str:
    return type(group._transport).__name__


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Starts processes that take the roles of a group's ranks, for tests of the group.
TEST_S = 120.0  # seconds; long, because the machine may be busy


class Ranks:
    """Runs a function that other processes can import on every rank of a new group."""

    def __init__(self, pool: ProcessPoolExecutor, folder: Path) -> None:
        self.folder = folder
        self.rendezvous = folder / "0.rendezvous"  # path of the rendezvous file of the last group
        self._pool = pool
        self._groups = itertools.count(1)

    def run(self, size: int, task: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Runs `task(group, *arguments)` on every rank. Returns the results or raises the first error. `options` are
        options of join_group."""
        self.rendezvous = self.folder / f"{next(self._groups)}.rendezvous"
        calls = [
            self._pool.submit(_play_rank, rank, size, self.rendezvous, options, task, arguments) for rank in range(size)
        ]
        return [call.result(TEST_S) for call in calls]


# What the ranks of all tests need is imported by one process, which forks them.
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["text_generation_server.load", "safetensors.torch"])


@contextmanager
def start_ranks(folder: Path, count: int = 4) -> Iterator[Ranks]:
    """Starts at most `count` processes, once for several tests."""
    with ProcessPoolExecutor(count, mp_context=FORKS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield Ranks(pool, folder)


def end_forks() -> None:
    """Ends the process that forks ranks. Nothing else would wait for it, and count what it has used."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _play_rank(
    rank: int, size: int, rendezvous: Path, options: dict[str, Any], task: Callable[..., Any], arguments: Any
) -> Any:
    group = join_group(rank, size, torch.device("cpu"), rendezvous, **options)
    try:
        return task(group, *arguments)
    finally:
        group.close()
