"""How long to wait before a child is started again, and when to give it up. Pure: the clock is handed in."""

import time
from collections.abc import Callable

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
MOST_FAILURES = 5
# The same for shards that had come up. One request that kills them is ended by the router at its fifth death, of which
# the launcher hears a little later than of the death; four more from other causes may come in between.
MOST_DEATHS = 10
LONG_RUN_S = 600.0


class Restarts:
    """The record of one child, or of one group of children that lives and dies together.

    `most_failures` in a row with no success between them are the end; so are five starts in a row that came to nothing.
    A child that ran for ten minutes starts with a clean record: an idle server proves itself by living.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_failures: int = MOST_FAILURES) -> None:
        self._most_failures = most_failures
        self._clock = clock
        self._failures = 0  # since the last success
        self._failed_starts = 0  # those of them that never came up
        self._wait_s = FIRST_WAIT_S
        self._up_since_s: float | None = None

    def came_up(self) -> None:
        self._up_since_s = self._clock()

    def succeeded(self) -> None:
        """It did what it is there for."""
        self._failures = self._failed_starts = 0
        self._wait_s = FIRST_WAIT_S

    def failed(self) -> float | None:
        """The seconds to wait before the next start; None: there should be none."""
        now_s, up_since_s = self._clock(), self._up_since_s
        self._up_since_s = None
        if up_since_s is not None and now_s - up_since_s >= LONG_RUN_S:
            self.succeeded()
        self._failures += 1
        self._failed_starts += up_since_s is None
        if self._failures >= self._most_failures or self._failed_starts >= MOST_FAILURES:
            return None
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return wait_s
