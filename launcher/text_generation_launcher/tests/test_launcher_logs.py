"""Log lines of children become log records of the launcher, which are written as text or JSON."""

import json
import logging
import sys

import pytest

from text_generation_common.logs import JsonFormatter, TextFormatter
from text_generation_launcher.relay import MAX_REASONS, RefusedConnections, Relay, record_of

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


REFUSED = (
    "I1124 01:43:44.903124   12803 ssl_transport_security.cc:2563] Handshake failed with error SSL_ERROR_SSL: "
    "error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: certificate has expired"
)


def test_a_connection_that_grpc_refuses_is_one_clear_warning_of_its_child(caplog):
    caplog.set_level("INFO")
    relay = Relay("engine", {"replica": 2})
    for _ in range(1000):
        relay.line(REFUSED)
    relay.line("I1124 01:43:44.903124   12803 other.cc:1] something else")
    refused, other = caplog.records
    assert (refused.name, refused.levelname, refused.fields) == ("engine", "WARNING", {"replica": 2})
    assert (
        refused.getMessage() == "A connection was refused: the peer's certificate is refused: certificate has expired"
    )
    assert other.getMessage().startswith("I1124") and other.levelname == "INFO"


def test_refused_connections_are_counted_by_their_reason_while_they_are_not_logged():
    refused = RefusedConnections()
    lines = [refused.take(REFUSED, at_s) for at_s in (5, 5, 6, 64, 65, 66)]
    assert [bool(line) for line in lines] == [True, False, False, False, True, False]
    assert lines[4] == f"{lines[0]} (3 more since the last line)"
    assert refused.take(REFUSED.replace("has expired", "is not yet valid"), 66)
    assert refused.take("a line", 66) is None


def test_reasons_without_end_take_no_memory_without_end():
    refused = RefusedConnections()
    for number in range(10 * MAX_REASONS):
        assert refused.take(f"E1124 01:43:44.1 1 a.cc:1] No match found for server name: h{number}", 0)
    assert len(refused._reported) == MAX_REASONS
