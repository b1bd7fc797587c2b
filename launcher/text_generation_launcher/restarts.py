"""How long to wait before a child is started again, and when to give it up. Pure: the clock is handed in."""

import time
from collections.abc import Callable

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
MOST_FAILURES = 5
STARTS_WINDOW_S = 60.0
LONG_RUN_S = 600.0


class Restarts:
    """The record of one child, or of one group of children that lives and dies together.

    Five failures with no success between them are the end, and so are five starts in a minute that led to nothing. Who
    ran for ten minutes starts with a clean record: an idle server proves itself by living.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._wait_s = FIRST_WAIT_S
        self._up_since_s: float | None = None
        self._failed_starts_s: list[float] = []

    def came_up(self) -> None:
        self._up_since_s = self._clock()

    def succeeded(self) -> None:
        """It did what it is there for."""
        self._failures = 0
        self._wait_s = FIRST_WAIT_S

    def failed(self) -> float | None:
        """The seconds to wait before the next start; None: there should be none."""
        now_s, up_since_s = self._clock(), self._up_since_s
        self._up_since_s = None
        if up_since_s is None:
            self._failed_starts_s.append(now_s)
        elif now_s - up_since_s >= LONG_RUN_S:
            self.succeeded()
        self._failed_starts_s = [then_s for then_s in self._failed_starts_s if now_s - then_s < STARTS_WINDOW_S]
        self._failures += 1
        if max(self._failures, len(self._failed_starts_s)) >= MOST_FAILURES:
            return None
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return wait_s
