"""Limits on the connections, bytes and seconds that clients may take, whatever they request."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from text_generation_router.metrics.metrics import Limit, Metrics

logger = logging.getLogger(__name__)

# Bytes of the kernel's send buffer of each connection. Set on the listening socket: accepted sockets inherit the size.
SEND_BUFFER_BYTES = 2**17


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int
    payload_bytes: int
    write_s: float  # seconds in which the client must read `write_progress_bytes` of a waiting answer
    # Seconds from the first byte of a request, or from the start of a connection, to the end of the headers.
    headers_s: float = 10.0
    # Seconds in which a connection beyond the limit of connections must send a request that is answered nevertheless.
    beyond_s: float = 1.0
    body_s: float = 30.0  # seconds from the end of the headers to the end of the body
    header_bytes: int = 2**16
    # In a body of more than `small_chunks` chunks, the average chunk must have at least `chunk_bytes` bytes.
    small_chunks: int = 512
    chunk_bytes: int = 64
    pipelined_requests: int = 8  # most unanswered requests on one connection
    # Bytes; 0: writing pauses, and the write deadline starts, as soon as the kernel does not take all bytes at once.
    write_buffer_bytes: int = 0
    write_progress_bytes: int = 2**15


class LimitHits:
    """Counts requests and connections that a limit ended. Logs at most one line per limit and second, because attackers
    choose how often a limit is reached."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._silent_until_s = dict.fromkeys(Limit, 0.0)
        self._unlogged = dict.fromkeys(Limit, 0)

    def count(self, limit: Limit) -> None:
        self._metrics.limit_hits.labels(limit=limit.value).inc()
        self._unlogged[limit] += 1
        now = time.monotonic()
        if now >= self._silent_until_s[limit]:
            logger.warning("limit reached: %s, %d times", limit.value, self._unlogged[limit])
            self._silent_until_s[limit], self._unlogged[limit] = now + 1, 0


# Deadlines of one connection: one for the client to send, and one for the client to read.


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
