"""TLS connections that gRPC has refused in a child. gRPC writes a line of its own for each, and tells Python nothing.

A peer with a wrong certificate tries again every second, and a port scanner a thousand times at once. So each reason is
logged at once, and then at most once in EACH_S, with the number of connections since.
"""

import re

from text_generation_common.cluster.handshakes import meaning

EACH_S = 60.0
# Most reasons that are told apart. Further ones are logged each time.
MOST_REASONS = 64
# The line of a C++ library that logs by absl: level, date, time, thread, place and text.
_NATIVE = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.]+:\d+\] (.*)")


class RefusedConnections:
    """The refused connections of one child."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, int]] = {}  # reason → time of its last line, refusals since then

    def take(self, line: str, now_s: float) -> str | None:
        """What to log for a line of the child: None if the line is not about a refused connection, "" for nothing."""
        native = _NATIVE.fullmatch(line)
        reason = None if native is None else meaning(native[1])
        if reason is None:
            return None
        last_s, count = self._told.get(reason, (-EACH_S, 0))
        if now_s - last_s < EACH_S:
            self._told[reason] = last_s, count + 1
            return ""
        if reason in self._told or len(self._told) < MOST_REASONS:
            self._told[reason] = now_s, 0
        since = f" ({count} more since the last line)" if count else ""
        return f"A connection was refused: {reason}{since}"
