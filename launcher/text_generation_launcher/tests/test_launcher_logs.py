"""Log lines of children become log records of the launcher, which are written as text or JSON."""

import json
import logging
import sys

import pytest

from text_generation_common.logs import JsonFormatter, TextFormatter
from text_generation_launcher.relay import record_of

LINE = {
    "timestamp": "2026-01-02T03:04:05.678901Z",
    "level": "WARNING",
    "message": "100% of it",
    "target": "text_generation_server.worker",
    "step": 4,
}


def test_a_json_line_keeps_everything_it_says():
    record = record_of(json.dumps(LINE), "shard", {"rank": 1})
    assert json.loads(JsonFormatter().format(record)) == LINE | {"rank": 1}
    assert TextFormatter().format(record) == (
        "2026-01-02T03:04:05.678901Z  WARNING text_generation_server.worker: 100% of it step=4 rank=1"
    )


def test_an_exception_of_a_child_is_kept():
    line = LINE | {"exception": "Traceback\nValueError: no"}
    record = record_of(json.dumps(line), "shard", {})
    assert json.loads(JsonFormatter().format(record)) == line
    assert TextFormatter().format(record).endswith("\nTraceback\nValueError: no")


@pytest.mark.parametrize(
    "line", ["plain", "{not json", '{"level": "ERROR"}', '{"message": 5}', "[1]", "{" * 100_000, '{"a":' * 100_000]
)
def test_a_line_that_is_not_a_log_line_is_passed_on_whole_at_info(line):
    record = record_of(line, "shard", {"rank": 0})
    assert (record.getMessage(), record.name, record.levelname) == (line, "shard", "INFO")


@pytest.mark.parametrize(
    ("level", "number"),
    [("ERROR", logging.ERROR), ("warn", logging.WARNING), ("DEBUG", logging.DEBUG), ("LOUD", logging.INFO)],
)
def test_levels_of_children_are_ours(level, number):
    assert record_of(json.dumps(LINE | {"level": level}), "shard", {}).levelno == number


def test_a_wrong_timestamp_does_not_lose_the_line():
    assert record_of(json.dumps(LINE | {"timestamp": "soon"}), "shard", {}).getMessage() == "100% of it"


def test_our_own_exceptions_are_written_with_their_traceback():
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("name", logging.ERROR, "file", 1, "it broke", (), sys.exc_info())
    assert "ValueError: no" in json.loads(JsonFormatter().format(record))["exception"]
    assert "ValueError: no" in TextFormatter().format(record)
