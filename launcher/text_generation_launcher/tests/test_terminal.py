"""What a start, an end and requests look like on a terminal."""

import logging
import os
import re
import termios
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from text_generation_launcher.relay import record_of
from text_generation_launcher.terminal import Screen, shortened, write_for_people

LONG = "a-model-with-a-very-long-name-" * 4
KERNELS = "kernels: cpu (avx2); not avx512, since this processor has no avx512bw, avx512dq"
# The lines of a start, as the launcher logs them, with two shards and two fronts.
START = [
    "Serving the demo model that ships with the package; choose another with --model-id",
    "Port 38241 was chosen for --port 0",
    "Port 38241 is open to other machines; --hostname 127.0.0.1 closes it",
    f"Starting check and download process for /a/path/{LONG}",
    "Files are already present on the host. Skipping download.",
    f"Successfully downloaded weights for /a/path/{LONG}",
    "Default `max_batch_prefill_tokens` to 2048",
    "Starting shard",
    *("Waiting for shard to be ready..." for _ in range(3)),
    *("loaded 47 tensors, 7.6 MiB read" for _ in range(2)),
    *(f"Server started at unix:///tmp/tgi-py-0/38241/shard-{rank} (cpu, bfloat16, {KERNELS})" for rank in range(2)),
    "Shard ready in 5.215s",
    "Starting Webserver",
    "Warming up model",
    "Setting max batch total tokens to 262144",
    "Starting Engine",
    "Engine serves its fronts at unix:///tmp/tgi-py-0/38241/shard-engine",
    *("engine unix:///tmp/tgi-py-0/38241/shard-engine is connected, term 17957" for _ in range(2)),
    *("Connected" for _ in range(2)),
]
# And of an end, in the order of a server with two fronts and of one without.
END = [
    "Terminating webserver",
    *("signal received, starting graceful shutdown" for _ in range(2)),
    *("engine unix:///tmp/tgi-py-0/38241/shard-engine is left" for _ in range(2)),
    "signal received, the engine ends after its last request",
    "Replica has left",
    "webserver terminated",
    "Shutting down shards",
    "Terminating shard",
    "shard terminated",
]
ADDRESS = "http://localhost:38241"
READY = {"api": ADDRESS, "docs": f"{ADDRESS}/docs", "metrics": f"{ADDRESS}/metrics"}


def records(name: str) -> Iterator[logging.LogRecord]:
    for message in START:
        made = made_of(message)
        yield logging.makeLogRecord(made | {"fields": {"rank": 0} if message.startswith("Server") else {}})
    for worker in range(2):
        fields = READY | {"worker": worker}
        yield logging.makeLogRecord(made | {"msg": "Serving %s", "args": (name,), "fields": fields})


def made_of(message: str) -> dict[str, object]:
    return {"msg": message, "levelno": logging.INFO, "levelname": "INFO", "created": 1e9}


def shown(screen: Screen, *every: logging.LogRecord) -> list[str]:
    return [line for record in every if screen.filter(record) for line in screen.format(record).splitlines()]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", ["demo", LONG])
def test_a_start_is_eight_lines_of_a_terminal_and_the_last_is_the_address_alone(
    columns: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = shown(Screen(has_colors=False), *records(name))
    assert len(lines) <= 8 and lines[-1] == ADDRESS
    assert all(len(line) <= columns for line in lines)
    assert all(re.match(r"\d\d:\d\d:\d\d  [A-Z]", line) for line in lines[:-1])
    text = "\n".join(lines)
    for needed in ("--hostname 127.0.0.1", "kernels: cpu (avx2)\n", "262144 tokens", "^C stops"):
        assert needed in text


def test_a_model_of_the_hub_is_named_while_its_files_are_checked() -> None:
    [line] = shown(Screen(False), logging.makeLogRecord(made_of("Starting check and download process for org/m")))
    assert line.endswith("  Checking the files of org/m")


def test_an_end_is_two_lines() -> None:
    lines = shown(Screen(has_colors=False), *(logging.makeLogRecord(made_of(message)) for message in END))
    assert [line[10:] for line in lines] == ["Stopping after the last request; ^C again: at once", "Stopped"]


def test_times_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        line = '{"timestamp": "2026-01-02T03:04:05.678901Z", "level": "INFO", "message": "Answered", "status": 404}'
        assert shown(Screen(has_colors=False), record_of(line, "router", {})) == ["08:49:05  Answered status=404"]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_what_fails_is_shown_whole_and_so_is_the_start_that_follows() -> None:
    screen = Screen(has_colors=False)
    lines = shown(screen, *records("demo"))
    error = {
        "levelno": logging.ERROR,
        "levelname": "ERROR",
        "msg": f"Shard 0 crashed {LONG}",
        "exc_text": "Traceback\nX",
    }
    [first, *rest] = shown(screen, logging.makeLogRecord(error))
    assert first.endswith(f"  ERROR Shard 0 crashed {LONG}") and rest == ["Traceback", "X"]
    assert shown(screen, *records("demo")) == lines


def test_the_end_of_a_generation_is_what_a_person_reads_of_it_and_each_has_its_line() -> None:
    made = '{"message": "Success", "total_time": "20.5s", "total_time_s": 20.5, "prompt_tokens": 12345, "seed": null,'
    made += ' "generated_tokens": 820, "route": "/v1/chat/completions", "finish_reason": "length", "request_id": "x"}'
    lines = shown(Screen(has_colors=False), *(record_of(made, "router", {"worker": 1}) for _ in range(2)))
    told = "/v1/chat/completions length: 12345 in, 820 out, 20.50 s, 40 tokens/s"
    assert [line[10:] for line in lines] == [told] * 2 and len(lines[0]) <= 80


def test_two_requests_of_one_kind_are_two_lines() -> None:
    refusals = [logging.makeLogRecord({"msg": "Answered", "levelno": 20, "levelname": "INFO"}) for _ in range(2)]
    assert len(shown(Screen(has_colors=False), *refusals)) == 2


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """A terminal's two ends, the second of which is the stdout of the log."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    root = logging.getLogger()
    handlers = root.handlers
    with os.fdopen(theirs, "w", buffering=1) as stdout:
        root.handlers = [logging.StreamHandler(stdout)]
        yield ours, stdout
    root.handlers = handlers
    os.close(ours)


@pytest.mark.parametrize(
    ("environ", "json_output", "form"),
    [
        ({"TERM": "xterm"}, False, "colors"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, "plain"),
        ({"TERM": "dumb"}, False, "plain"),
        ({}, False, "plain"),
        ({"TERM": "xterm"}, True, "as it was"),
        ({"TERM": "xterm", "LOG_LEVEL": "info,text_generation_router=debug"}, False, "as it was"),
    ],
)
def test_colors_are_for_terminals_that_have_them(
    environ: dict[str, str], json_output: bool, form: str, terminal: tuple[int, TextIO]
) -> None:
    shown_on, stdout = terminal
    del logging.getLogger().handlers[1:]  # pytest's own, which would keep the form
    write_for_people(stdout, environ, json_output)
    logging.getLogger().warning("slow")
    line = os.read(shown_on, 1000).decode()
    assert ("\x1b[" in line) == (form == "colors")
    assert (line == "slow\r\n") == (form == "as it was")


def test_the_middle_of_a_long_line_is_left_out() -> None:
    assert shortened("abcdefgh", 8) == "abcdefgh" and shortened("abcdefghi", 8) == "abcd…ghi"
