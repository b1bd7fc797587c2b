"""Starts processes that take the roles of a group's ranks, for tests of the group."""

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from text_generation_server.distributed import join_group

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
        options of join_group.
        """
        self.rendezvous = self.folder / f"{next(self._groups)}.rendezvous"
        calls = [
            self._pool.submit(_play_rank, rank, size, self.rendezvous, options, task, arguments) for rank in range(size)
        ]
        return [call.result(TEST_S) for call in calls]


@contextmanager
def start_ranks(folder: Path, count: int = 4) -> Iterator[Ranks]:
    """Starts `count` processes once for several tests, because each of them must import torch."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield Ranks(pool, folder)


def _play_rank(
    rank: int, size: int, rendezvous: Path, options: dict[str, Any], task: Callable[..., Any], arguments: Any
) -> Any:
    group = join_group(rank, size, torch.device("cpu"), rendezvous, **options)
    try:
        return task(group, *arguments)
    finally:
        group.close()
