"""When a call is made again: the server was busy or not there, and nothing of its answer has been received."""

import asyncio
import logging
import random
import re
from dataclasses import dataclass
from datetime import UTC, datetime

from text_generation.errors import (
    OverloadedError,
    RateLimitExceededError,
    ServerConnectionError,
    TextGenerationError,
    ValidationError,
)
from text_generation.timeouts import Stopwatch, Timeout

_log = logging.getLogger("text_generation")

BUSY = (429, 503)
# A pause is longer than asked for by up to this part of it, so that clients refused together do not return together.
JITTER = 0.25


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a call is made again after status 429 or 503, or if no connection could be made. A plain number given
    to a client is `times` alone.

    times: attempts after the first; 0: none.
    first_pause: seconds before the second attempt if the server does not say how long. Later pauses are each twice as
    long as the one before.
    longest_pause: seconds. If the server's `Retry-After` is longer, its error is raised at once.
    """

    times: int = 2
    first_pause: float = 0.5
    longest_pause: float = 30.0

    def __post_init__(self) -> None:
        if self.times < 0:
            raise ValidationError(f"`retries.times` must not be negative. Given: {self.times}")
        for name in ("first_pause", "longest_pause"):
            if not getattr(self, name) > 0:
                raise ValidationError(f"`retries.{name}` must be strictly positive. Given: {getattr(self, name)}")

    @classmethod
    def of(cls, value: "int | Retries") -> "Retries":
        return value if isinstance(value, Retries) else cls(times=value)

    def pause_s(self, failed: int, error: TextGenerationError, chance: float) -> float | None:
        """Seconds to wait after attempt number `failed` (from 1); None: `error` is final. `chance`: from 0 to 1."""
        if failed > self.times or not is_temporary(error):
            return None
        asked_s = error.retry_after_s
        if asked_s is not None and asked_s > self.longest_pause:
            return None
        pause_s = min(self.first_pause * 2 ** (failed - 1), self.longest_pause) if asked_s is None else asked_s
        return pause_s * (1 + JITTER * chance)


def is_temporary(error: TextGenerationError) -> bool:
    if isinstance(error, ServerConnectionError):
        return not error.connected
    return error.status in BUSY or isinstance(error, OverloadedError | RateLimitExceededError)


class Call:
    """One call of a user with all its attempts. Its time limits begin when this object is made."""

    def __init__(self, timeout: Timeout, retries: Retries, *, streams: bool) -> None:
        self.watch = Stopwatch(timeout)
        self.request_id: str | None = None  # the `X-Request-Id` of the last answer
        self.has_events = False  # True: a retry would repeat what the user has already received
        self._retries = retries
        self._streams = streams
        self._failed = 0

    async def retry(self, error: TextGenerationError) -> None:
        """Pauses before the next attempt. Raises `error` if there is none, or if the pause would outlast the call's
        limits.
        """
        self._failed += 1
        error.request_id = self.request_id
        pause_s = None if self.has_events else self._retries.pause_s(self._failed, error, random.random())
        if pause_s is None or pause_s >= self.watch.left_s(self._streams):
            raise error.with_traceback(None) from None
        _log.info("attempt %d failed (%s); the next is in %.1f s", self._failed, error, pause_s)
        await asyncio.sleep(pause_s)


def retry_after_s(header: str | None) -> float | None:
    """The seconds of a `Retry-After` header, which has a number or a date; None: no header, or it has neither."""
    if header is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", header.strip()):
        return float(header)
    from email.utils import parsedate_to_datetime  # slow to load, and rarely needed

    try:
        until = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max((until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)
