"""Deadlines of one connection: one for the client to send, and one for the client to read."""

import asyncio
from collections.abc import Callable

from text_generation_router.http.limits import ConnectionLimits, LimitHits
from text_generation_router.metrics.metrics import Limit


class Deadline:
    """A deadline with at most one timer, which each `set` starts anew."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, delay_s: float, on_passed: Callable[[], None]) -> None:
        self.clear()
        self._timer = self._loop.call_later(delay_s, self._pass, on_passed)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pass(self, on_passed: Callable[[], None]) -> None:
        self._timer = None
        on_passed()


class WriteDeadline:
    """Aborts a connection whose client does not read. The deadline is started when the server writes nothing more, so
    the transport's buffer shrinks only if the client reads.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        limits: ConnectionLimits,
        hits: LimitHits,
    ) -> None:
        self._deadline = Deadline(loop)
        self._transport = transport
        self._limits = limits
        self._hits = hits
        self._pending = 0  # bytes in the transport's buffer when the deadline was started

    def start(self) -> None:
        self._pending = self._transport.get_write_buffer_size()
        if self._pending:
            self._deadline.set(self._limits.write_s, self._passed)
        else:
            self._deadline.clear()

    def stop(self) -> None:
        self._deadline.clear()

    def _passed(self) -> None:
        pending = self._transport.get_write_buffer_size()
        if pending and pending > self._pending - self._limits.write_progress_bytes:
            self._hits.count(Limit.WRITE_TIME)
            self._transport.abort()
        else:
            self.start()
