"""The progress of a download: lines now and then, or a bar on a terminal, drawn from what the child reports."""

import io
import json
import logging
import os
import subprocess
import sys
import termios

from text_generation_launcher.progress import CLEAR, LINE_S, DownloadDisplay


def record(received: int, left_s: int | None = 9) -> logging.LogRecord:
    fields = {"received_bytes": received, "total_bytes": 100, "bytes_per_s": 10, "left_s": left_s}
    return logging.makeLogRecord({"msg": f"Download: {received} of 100", "fields": fields})


def other() -> logging.LogRecord:
    return logging.makeLogRecord({"msg": "tried in vain", "fields": {}})


def test_without_a_terminal_there_is_a_line_every_few_seconds_and_one_at_the_end():
    now_s = 0.0
    display = DownloadDisplay(None, clock=lambda: now_s)
    logged = []
    for tick in range(1, 25):
        now_s = tick / 2
        logged += [now_s] if not display.takes(record(tick)) else []
    assert logged == [LINE_S, 2 * LINE_S]
    assert not display.takes(record(100, left_s=0)) and not display.takes(other())


def test_lines_of_text_have_no_fields_and_json_keeps_them():
    for has_fields in (False, True):
        last = record(100, left_s=0)
        assert not DownloadDisplay(None, has_fields).takes(last)
        assert bool(last.fields) is has_fields


def test_a_bar_grows_in_one_line_and_makes_room_for_other_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    terminal = io.StringIO()
    display = DownloadDisplay(terminal)
    assert all(display.takes(record(received)) for received in (25, 50))
    assert not display.takes(other())
    assert display.takes(record(100))
    first, second, cleared, third = terminal.getvalue().split(CLEAR)[1:]
    assert [(bar.count("#"), bar.count(".")) for bar in (first, second, third)] == [(9, 28), (18, 19), (36, 0)]
    assert cleared == "" and len(third) < 60 and "\n" not in terminal.getvalue()


def test_a_narrow_terminal_gets_the_numbers_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    terminal = io.StringIO()
    assert DownloadDisplay(terminal).takes(record(50))
    assert terminal.getvalue() == f"{CLEAR}{'Download: 50 of 100'[:19]}"


def test_the_launcher_draws_on_its_terminal_and_logs_elsewhere(site):
    launch = site.launch("--json-output", FAKE_DOWNLOAD="reports").ready()
    told = [json.loads(line) for line in launch.stdout.splitlines() if "received_bytes" in line]
    assert [line["received_bytes"] for line in told] == [100]  # the others came within LINE_S of the start

    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    script = "from text_generation_launcher import progress; print(progress.make_display(False)._terminal.name)"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=theirs, text=True, check=True)
    os.close(theirs)
    os.close(ours)
    assert done.stdout.strip() == "<stderr>"
