"""Refuses requests when too many prompt tokens wait, and forecasts when a refused request is worth sending again."""

import time

from text_generation_router.engine.retry_after import RetryAfter
from text_generation_router.errors import Refusal, RefusedError
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.share import Share

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
