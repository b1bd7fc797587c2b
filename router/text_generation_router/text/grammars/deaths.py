"""Texts at which child processes died, so that no further child dies at them. Uses no processes and no event loop."""

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_TEXTS = 1024
REFUSED_S = 600.0
# Number of deaths at which a text is refused.
DEATHS = 2


class DeadlyTexts:
    """The deaths at each text, by its digest. Deaths are forgotten REFUSED_S after the last one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # with the time of the last one

    def __len__(self) -> int:
        return len(self._deaths)

    def note(self, digest: bytes) -> None:
        """Notes a death."""
        self._deaths[digest] = (self._count(digest) + 1, self._clock())
        self._deaths.move_to_end(digest)
        if len(self._deaths) > MAX_TEXTS:
            self._deaths.popitem(last=False)

    def is_refused(self, digest: bytes) -> bool:
        return self._count(digest) >= DEATHS

    def _count(self, digest: bytes) -> int:
        count, last_s = self._deaths.get(digest, (0, 0.0))
        return count if self._clock() < last_s + REFUSED_S else 0
