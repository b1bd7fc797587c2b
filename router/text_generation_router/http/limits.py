"""Limits on the connections, bytes and seconds that clients may take, whatever they request."""

import logging
import time
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
    beyond_s: float = 1.0  # seconds in which a connection beyond the limit must send a request that is answered there
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
