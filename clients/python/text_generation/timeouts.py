"""Limits on the time for which a call may wait."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import TypeVar

from text_generation.errors import TimeoutExceededError, ValidationError, Wait

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timeout:
    """Limits in seconds; None: no limit. A plain number given to a client is `total` alone, as in TGI's client.

    connect: until the connection, with its TLS session, is made.
    first_token: from the start of the call to the first event of a stream.
    between_tokens: from asking for the next event of a stream to having it; keep-alive comments do not count as events.
    total: the whole call, streaming or not.
    """

    connect: float | None = 10.0
    first_token: float | None = 60.0
    between_tokens: float | None = 30.0
    total: float | None = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            limit_s = getattr(self, field.name)
            if limit_s is not None and not limit_s > 0:
                raise ValidationError(f"`timeout.{field.name}` must be strictly positive or None. Given: {limit_s}")

    @classmethod
    def of(cls, value: "float | Timeout") -> "Timeout":
        if isinstance(value, Timeout):
            return value
        return cls(connect=None, first_token=None, between_tokens=None, total=float(value))


class Stopwatch:
    """Limits the waits of one call. The call starts when this object is made."""

    def __init__(self, timeout: Timeout) -> None:
        self._timeout = timeout
        self._started = time.monotonic()

    async def answer(self, action: Callable[[], Awaitable[T]]) -> T:
        return await self._run(action, "total", self._started, None)

    async def first_token(self, action: Callable[[], Awaitable[T]]) -> T:
        return await self._run(action, "first_token", self._started, self._timeout.first_token)

    async def next_token(self, action: Callable[[], Awaitable[T]]) -> T:
        return await self._run(action, "between_tokens", time.monotonic(), self._timeout.between_tokens)

    def left_s(self, streams: bool) -> float:
        """Seconds that are left until the answer, or until the first event of a stream."""
        limits = [self._timeout.total, self._timeout.first_token if streams else None]
        waited_s = time.monotonic() - self._started
        return min((limit_s - waited_s for limit_s in limits if limit_s is not None), default=math.inf)

    async def _run(self, action: Callable[[], Awaitable[T]], wait: Wait, since: float, limit_s: float | None) -> T:
        """Runs `action` until `since + limit_s`, or until the call has taken `total` seconds, whichever is first."""
        deadline = since + limit_s if limit_s is not None else None
        if (total_s := self._timeout.total) is not None:
            end = self._started + total_s
            if deadline is None or end < deadline:
                deadline, wait, limit_s = end, "total", total_s
        if deadline is None or limit_s is None:
            return await action()
        try:
            async with asyncio.timeout(deadline - time.monotonic()) as scope:
                return await action()
        except TimeoutError:
            if not scope.expired():
                raise  # the connection's own timeout, not one of these limits
            raise TimeoutExceededError(wait, limit_s) from None
