"""Passes on the log lines of children: each line is logged with the child's own time, level and target."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from text_generation_common.logs import LEVELS
from text_generation_launcher.refused_connections import RefusedConnections


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
        if (told := self._refused.take(line, time.monotonic())) is not None:
            if told:
                logging.getLogger(self._source).warning("%s", told, extra={"fields": dict(self._fields)})
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
