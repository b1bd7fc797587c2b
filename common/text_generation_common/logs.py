"""Writes the log lines of all our processes, as text or each as one JSON object. Standard library only."""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

LEVELS = {"trace": "DEBUG", "debug": "DEBUG", "info": "INFO", "warn": "WARNING", "warning": "WARNING", "error": "ERROR"}


# The id of the HTTP request that is being answered; "" in all other work.
request_id: ContextVar[str] = ContextVar("request_id", default="")


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = f"{timestamp(record)} {record.levelname:>8} {record.name}: {text_of(record)}"
        exception = exception_text(self, record)
        return f"{line}\n{exception}" if exception else line


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": timestamp(record),
            "level": record.levelname,
            "message": record.getMessage(),
            "target": record.name,
        }
        line |= getattr(record, "fields", {})
        if identity := id_of(record):
            line["request_id"] = identity
        exception = exception_text(self, record)
        if exception:
            line["exception"] = exception
        return json.dumps(line, ensure_ascii=False)


def text_of(record: logging.LogRecord) -> str:
    """The message, fields and id of a line of text. `total_time_s`, a number, is left out beside `total_time`, the same
    time with its unit."""
    fields = dict(getattr(record, "fields", {}))
    if identity := id_of(record):
        fields["request_id"] = identity
    numbers = {name for name in fields if name.endswith("_s") and name.removesuffix("_s") in fields}
    return record.getMessage() + "".join(f" {name}={fields[name]}" for name in fields if name not in numbers)


def id_of(record: logging.LogRecord) -> str:
    """The id of the request that a line is about. A line that is written outside of the request's own task has the id
    in `extra`, as `request_id`."""
    return getattr(record, "request_id", "") or request_id.get()


def exception_text(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    """The traceback of an exception of this process, or the text of an exception that a child has logged."""
    return formatter.formatException(record.exc_info) if record.exc_info else record.exc_text


def timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def setup_logging(level: str = "info", json_output: bool = False) -> None:
    """Sets up logging to stdout. `level` is TGI's LOG_LEVEL: a level's name, or a filter such as
    `info,text_generation_router=debug`.
    """
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter() if json_output else TextFormatter())
    logging.basicConfig(level="INFO", handlers=[handler], force=True)
    for part in level.split(","):
        target, _, name = part.strip().rpartition("=")
        logging.getLogger(target or None).setLevel(LEVELS.get(name.lower(), "INFO"))
    # These libraries log every request at INFO, or their internals at DEBUG.
    for library in ("asyncio", "httpx", "httpx2", "httpcore", "uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(library).setLevel("WARNING")
