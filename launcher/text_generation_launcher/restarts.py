"""Decides how long to wait before a child is started again, and when to give up. Does no input or output; the clock is
an argument.
"""

import time
from collections.abc import Callable

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
# Failures in a row after which a child is not started again.
MOST_FAILURES = 5
# The same limit for shards that had become ready. The router ends a request that kills shards at the request's fifth
# death; its message reaches the launcher a little after the death, and up to four deaths of other causes may come
# before it.
MOST_DEATHS = 10
# A run of this many seconds counts as a success.
LONG_RUN_S = 600.0


class Restarts:
    """The record of one child, or of one group of children that start and end together.

    After `most_failures` failures in a row, or MOST_FAILURES failed starts in a row (the child did not become ready),
    there are no more starts. A child that ran for `long_run_s` seconds has a clean record, because an idle server has
    no other success to show.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        most_failures: int = MOST_FAILURES,
        long_run_s: float = LONG_RUN_S,
    ) -> None:
        self._most_failures = most_failures
        self._long_run_s = long_run_s
        self._clock = clock
        self._failures = 0  # number of failures since the last success
        self._failed_starts = 0  # number of failed starts since the last success: the child did not become ready
        self._wait_s = FIRST_WAIT_S
        self._up_since_s: float | None = None

    def came_up(self) -> None:
        self._up_since_s = self._clock()

    def succeeded(self) -> None:
        """Clears the record, because the child has done useful work."""
        self._failures = self._failed_starts = 0
        self._wait_s = FIRST_WAIT_S

    def failed(self) -> float | None:
        """Records a failure. Returns the seconds to wait before the next start, or None when there should be no next
        start.
        """
        now_s, up_since_s = self._clock(), self._up_since_s
        self._up_since_s = None
        if up_since_s is not None and now_s - up_since_s >= self._long_run_s:
            self.succeeded()
        self._failures += 1
        self._failed_starts += up_since_s is None
        if self._failures >= self._most_failures or self._failed_starts >= MOST_FAILURES:
            return None
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return wait_s
