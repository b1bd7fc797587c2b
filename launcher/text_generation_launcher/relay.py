"""Passes on the log lines of children: each line is logged with the child's own time, level and target."""

import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from text_generation_common.cluster.handshakes import meaning
from text_generation_common.logs import LEVELS

# Seconds between two lines about refused connections for one reason.
EACH_S = 60.0
# Maximum number of reasons that are told apart. Further ones are logged each time.
MAX_REASONS = 64
# The line of a C++ library that logs by absl: level, date, time, thread, place and text.
_NATIVE = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.]+:\d+\] (.*)")


class Relay:
    """Logs the lines of the child `source`. A line that is not a JSON log line is passed on whole, at INFO; gRPC's own
    lines about connections that it refused are told as warnings. A record that `takes` accepts is shown in another
    way."""

    def __init__(
        self,
        source: str,
        fields: Mapping[str, object],
        takes: Callable[[logging.LogRecord], bool] = lambda record: False,
    ) -> None:
        self._source = source
        self._fields = fields
        self._takes = takes
        self._refused = RefusedConnections()

    def line(self, line: str) -> None:
        if (warning := self._refused.take(line, time.monotonic())) is not None:
            if warning:
                logging.getLogger(self._source).warning("%s", warning, extra={"fields": dict(self._fields)})
            return
        record = record_of(line, self._source, self._fields)
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno) and not self._takes(record):
            logger.handle(record)


def record_of(line: str, source: str, fields: Mapping[str, object]) -> logging.LogRecord:
    entry = _parse(line)
    if entry is None:
        entry = {"message": line}
    level = LEVELS.get(str(entry.pop("level", "info")).lower(), "INFO")
    attributes = {
        "name": str(entry.pop("target", source)),
        "levelname": level,
        "levelno": logging.getLevelNamesMapping()[level],
        "msg": entry.pop("message"),
        "created": _seconds(entry.pop("timestamp", None)),
        "exc_text": entry.pop("exception", None),
        "fields": entry | dict(fields),
    }
    return logging.makeLogRecord(attributes)


def _parse(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry.get("message"), str) else None


def _seconds(timestamp: object) -> float:
    try:
        return datetime.fromisoformat(str(timestamp)).timestamp()
    except ValueError:
        return time.time()


class RefusedConnections:
    """TLS connections that gRPC has refused in a child. gRPC writes a line of its own for each, and tells Python
    nothing.

    A peer with a wrong certificate tries again every second, and a port scanner a thousand times at once. So each
    reason is logged at once, and then at most once in EACH_S, with the number of connections since."""

    def __init__(self) -> None:
        self._reported: dict[str, tuple[float, int]] = {}  # reason → time of its last line, refusals since then

    def take(self, line: str, now_s: float) -> str | None:
        """What to log for a line of the child: None if the line is not about a refused connection, "" for nothing."""
        native = _NATIVE.fullmatch(line)
        reason = None if native is None else meaning(native[1])
        if reason is None:
            return None
        last_s, count = self._reported.get(reason, (-EACH_S, 0))
        if now_s - last_s < EACH_S:
            self._reported[reason] = last_s, count + 1
            return ""
        if reason in self._reported or len(self._reported) < MAX_REASONS:
            self._reported[reason] = now_s, 0
        since = f" ({count} more since the last line)" if count else ""
        return f"A connection was refused: {reason}{since}"
