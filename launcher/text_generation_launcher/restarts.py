"""Decides how long to wait before a child is started again, and when to give up. Does no input or output; the clock is
an argument.
"""

import time
from collections.abc import Callable

from text_generation_common.backoff import Backoff

FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0
# Failures in a row after which a child is not started again.
MAX_FAILURES = 5
# The same limit for shards that had become ready. The router ends a request that kills shards at the request's fifth
# death; its message reaches the launcher a little after the death, and up to four deaths of other causes may come
# before it.
MAX_DEATHS = 10
# Most failures in a row without a wait, where the next start costs nothing. Not four, the most that end no request: the
# launcher gives up after MAX_FAILURES failed starts, and without any wait these could all be in the same second.
MAX_TAKEOVERS = 3
# A run of this many seconds counts as a success.
LONG_RUN_S = 600.0


class Restarts:
    """The record of one child, or of one group of children that start and end together.

    After `max_failures` failures in a row, or MAX_FAILURES failed starts in a row (the child did not become ready),
    there are no more starts. A child that ran for `long_run_s` seconds has a clean record, because an idle server has
    no other success to show.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        max_failures: int = MAX_FAILURES,
        long_run_s: float = LONG_RUN_S,
    ) -> None:
        self._max_failures = max_failures
        self._clock = clock
        self._backoff = Backoff(FIRST_WAIT_S, MAX_WAIT_S, long_run_s)
        self._failed_starts = 0  # number of failed starts since the last success: the child did not become ready

    def came_up(self) -> None:
        self._backoff.came_up(self._clock())

    def succeeded(self) -> None:
        """Clears the record, because the child has done useful work."""
        self._backoff.reset()
        self._failed_starts = 0

    def failed(self, stands_by: bool = False) -> float | None:
        """Records a failure. Returns the seconds to wait before the next start, or None when there should be no next
        start. `stands_by`: the next start costs nothing, so the first MAX_TAKEOVERS do not wait.
        """
        is_failed_start = not self._backoff.is_up
        wait_s = self._backoff.failed(self._clock())
        if self._backoff.failures == 1:
            self._failed_starts = 0
        self._failed_starts += is_failed_start
        gives_up = self._backoff.failures >= self._max_failures or self._failed_starts >= MAX_FAILURES
        if gives_up:
            return None
        return 0.0 if stands_by and self._backoff.failures <= MAX_TAKEOVERS else wait_s
