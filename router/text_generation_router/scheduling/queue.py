"""Requests that wait, first come first served. One that is put back goes to where its arrival belongs."""

import bisect
from collections import deque
from collections.abc import Iterator

from text_generation_router.scheduling.running import Running


class Queue:
    def __init__(self) -> None:
        self._waiting: deque[Running] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def append(self, request: Running) -> None:
        self._waiting.append(request)

    def put_back(self, request: Running) -> None:
        """Before everything that arrived later."""
        bisect.insort(self._waiting, request, key=lambda waiting: waiting.id)

    def waiting(self) -> Iterator[Running]:
        """From the head on."""
        return iter(self._waiting)

    def remove(self, request: Running) -> None:
        self._waiting.remove(request)
