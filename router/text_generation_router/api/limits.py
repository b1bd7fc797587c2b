"""How much a client may take of the server before it has asked for anything: connections, bytes, seconds."""

import logging
import time
from dataclasses import dataclass

from text_generation_router.metrics import Limit, Metrics

logger = logging.getLogger(__name__)

# Of the kernel, per connection; set on the listening socket, from which the accepted ones inherit it.
SEND_BUFFER_BYTES = 2**17


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int
    payload_bytes: int
    write_s: float  # for a client to take `write_progress_bytes` while an answer waits for it
    headers_s: float = 10.0  # from the first byte of a request, or of a connection, to the end of the headers
    body_s: float = 30.0  # from the end of the headers to the end of the body
    header_bytes: int = 2**16
    # Of a body with more than `small_chunks` chunks, the average chunk must have `chunk_bytes` bytes.
    small_chunks: int = 512
    chunk_bytes: int = 64
    pipelined_requests: int = 8  # sent ahead of the answers
    # None of our own: what the kernel does not take yet is waited for, and the deadline runs from then on.
    write_buffer_bytes: int = 0
    write_progress_bytes: int = 2**15


class LimitHits:
    """Counts what the limits ended. Logs too, but not more than a line per limit and second: it is attackers who choose
    how often this happens."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._silent_until = dict.fromkeys(Limit, 0.0)
        self._unsaid = dict.fromkeys(Limit, 0)

    def count(self, limit: Limit) -> None:
        self._metrics.limit_hits.labels(limit=limit.value).inc()
        self._unsaid[limit] += 1
        now = time.monotonic()
        if now >= self._silent_until[limit]:
            logger.warning("limit reached: %s, %d times", limit.value, self._unsaid[limit])
            self._silent_until[limit], self._unsaid[limit] = now + 1, 0
