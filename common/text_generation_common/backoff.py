"""Waits before another try, each twice as long as the one before. Does no input or output; the time is an argument."""

from math import inf


class Backoff:
    """The failures of one thing that is tried again and again. The waits begin anew after a run of `long_run_s`
    seconds, or after `reset`."""

    def __init__(self, first_s: float, max_s: float, long_run_s: float = inf) -> None:
        self.failures = 0  # since the waits began anew
        self._first_s = self._next_s = first_s
        self._max_s = max_s
        self._long_run_s = long_run_s
        self._up_since_s: float | None = None

    @property
    def is_up(self) -> bool:
        """Whether `came_up` was called since the last failure."""
        return self._up_since_s is not None

    def came_up(self, now_s: float) -> None:
        """The thing works. Further calls before the next failure have no effect."""
        if self._up_since_s is None:
            self._up_since_s = now_s

    def reset(self) -> None:
        self.failures = 0
        self._next_s = self._first_s

    def failed(self, now_s: float) -> float:
        """Seconds to wait before the next try."""
        if self._up_since_s is not None and now_s - self._up_since_s >= self._long_run_s:
            self.reset()
        self._up_since_s = None
        self.failures += 1
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return wait_s
