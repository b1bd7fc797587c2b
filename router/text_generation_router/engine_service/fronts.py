"""The fronts that are connected to an engine."""

import asyncio
import time
from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from typing import TypeVar

from text_generation_router.engine.protocol import Snapshot
from text_generation_router.engine_service.work import FrontCounts, FrontWork
from text_generation_router.errors import FrontLostError
from text_generation_router.view.values import FrontNote, short_id

# An engine's permits are leased to its fronts: the lease of a front is the number of requests that the front may have
# on the engine.

F = TypeVar("F", bound=Hashable)


def leases(permits: int, used: Mapping[F, int]) -> dict[F, int]:
    """The lease of each front: the permits that the other fronts do not use, so that a single front may have the whole
    load. `used`: requests that each front has on the engine. Fronts that take permits at the same time may take more
    than there are, until the next Load reports the others' use."""
    total = sum(used.values())
    return {front: max(0, permits - (total - count)) for front, count in used.items()}


class ConnectedFronts:
    """Reports to all fronts that the shards are lost, or that new shards are ready."""

    def __init__(self, permits: int, counts: FrontCounts) -> None:
        """`permits`: requests that all fronts may have on the engine."""
        self._permits = permits
        self._counts = counts
        # Each front, and a future that fails when the front's stream has to end.
        self._fronts: dict[str, tuple[FrontWork, asyncio.Future[None]]] = {}
        self._left: tuple[FrontNote, float] | None = None  # the front that left last, and when

    def __len__(self) -> int:
        return len(self._fronts)

    def add(self, work: FrontWork) -> "asyncio.Future[None]":
        """Returns a future that fails with FrontLostError when the same front opens another stream, which then replaces
        this stream."""
        if (old := self._fronts.get(work.front_id)) is not None and not old[1].done():
            old[1].set_exception(FrontLostError("the front has opened another stream"))
        ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fronts[work.front_id] = work, ends
        self._counts.fronts.set(len(self._fronts))
        return ends

    def remove(self, work: FrontWork) -> None:
        if self._fronts.get(work.front_id, (None,))[0] is work:
            self._left = FrontNote(short_id(work.front_id), work.num_open), time.monotonic()
            del self._fronts[work.front_id]
            self._counts.fronts.set(len(self._fronts))

    def close(self) -> None:
        """Ends all streams, each once its waiting messages are sent."""
        for _, ends in self._fronts.values():
            if not ends.done():
                ends.set_result(None)

    def leases(self) -> dict[str, int]:
        """The permits of each front."""
        return leases(self._permits, {name: work.num_open for name, (work, _) in self._fronts.items()})

    def newest_index(self, front_id: str) -> int:
        """Greatest index of the front's Submits; 0: there was none, or the front is not connected."""
        work = self.find(front_id)
        return work.newest_index if work is not None else 0

    def find(self, front_id: str) -> FrontWork | None:
        """The front's stream, if it is connected."""
        return self._fronts[front_id][0] if front_id in self._fronts else None

    def notes(self) -> list[FrontNote]:
        """The fronts, and the one that left last, for people."""
        notes = [FrontNote(short_id(name), work.num_open) for name, (work, _) in self._fronts.items()]
        if self._left is not None:
            left, at = self._left
            notes.append(replace(left, left_s=round(time.monotonic() - at, 1)))
        return notes

    def lost(self, reason: str, aboard: Collection[int]) -> None:
        for work, _ in self._fronts.values():
            work.lost(reason, aboard)

    def ready(self, snapshot: Snapshot) -> None:
        for work, _ in self._fronts.values():
            work.ready(snapshot)
