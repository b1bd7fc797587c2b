"""Refuses requests when too many prompt tokens wait, and forecasts when a refused request is worth sending again."""

import math
import time
from collections import deque
from collections.abc import Callable

from text_generation_router.errors import Refusal, RefusedError
from text_generation_router.scheduling.request import Share
from text_generation_router.scheduling.scheduler import Scheduler

# The Retry-After of refused requests: a forecast, in seconds, of when a request would have started.

# Number of latest steps over which the mean step duration is taken.
WINDOW = 64
# Seconds for which a forecast is reused, because a forecast walks over every request.
FRESH_S = 1.0
MAX_RETRY_AFTER_S = 60


class RetryAfter:
    """Forecasts a start in seconds: the scheduler's forecast in steps times the mean duration of recent steps."""

    def __init__(self, steps_until_start: Callable[[], float]) -> None:
        self._steps_until_start = steps_until_start
        self._steps_s: deque[float] = deque(maxlen=WINDOW)
        self._received_s = -math.inf
        self._forecast_at_s = -math.inf
        self._forecast_s = 0.0

    def note_step(self, sent_s: float, received_s: float) -> None:
        """Notes an answered step. Its duration is counted from the previous step's answer, if that came after
        `sent_s`: until then the step waited."""
        self._steps_s.append(received_s - max(sent_s, self._received_s))
        self._received_s = received_s

    def seconds(self, now_s: float) -> int:
        """Whole seconds, from 1 to MAX_RETRY_AFTER_S."""
        return max(1, math.ceil(min(self.wait_s(now_s), MAX_RETRY_AFTER_S)))

    def wait_s(self, now_s: float) -> float:
        if now_s - self._forecast_at_s >= FRESH_S:
            self._forecast_at_s, self._forecast_s = now_s, self._forecast()
        return self._forecast_s

    def _forecast(self) -> float:
        if not self._steps_s:
            return 0.0
        return self._steps_until_start() * sum(self._steps_s) / len(self._steps_s)


# Default of `max_queued_tokens`, in multiples of the token slots.
QUEUED_CAPACITIES = 16


class Overload:
    def __init__(self, scheduler: Scheduler, max_queued_tokens: int | None) -> None:
        """`max_queued_tokens`: prompt tokens that may wait; None: QUEUED_CAPACITIES times the slots."""
        self._scheduler = scheduler
        self._max_queued_tokens = max_queued_tokens
        self._retry_after = RetryAfter(scheduler.steps_until_start)

    def check(self, share: Share, tokens: int) -> None:
        """Refuses requests of `tokens` prompt tokens in all with RefusedError if too many prompt tokens wait, and their
        owner or tenant has used its share of them.
        """
        most = self._max_queued_tokens or QUEUED_CAPACITIES * self._scheduler.limits.capacity
        if not self._scheduler.queue.has_room(share, tokens, most):
            raise RefusedError(Refusal.OVERLOADED, self.retry_after_s())

    def retry_after_s(self) -> int:
        """Forecast: seconds until a request that is refused now would have started."""
        return self._retry_after.seconds(time.perf_counter())

    def wait_s(self) -> float:
        """Forecast: seconds until a request that arrives now starts."""
        return self._retry_after.wait_s(time.perf_counter())

    def note_step(self, sent_s: float, received_s: float) -> None:
        """Notes an answered forward step, for the forecast."""
        self._retry_after.note_step(sent_s, received_s)
