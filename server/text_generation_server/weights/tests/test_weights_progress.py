"""Lines about a download: bytes, speed and time left, also of a single file and while nothing arrives."""

import json
import logging
import time

import pytest

from text_generation_server.weights import progress
from text_generation_server.weights.files import LineStyle
from text_generation_server.weights.progress import DownloadSpeed, Lines, sized


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO)
    return caplog


def test_a_speed_is_that_of_the_last_seconds():
    speed = DownloadSpeed()
    assert speed.at(0.0, 0) == 0.0
    assert [speed.at(float(second), 100 * second) for second in range(1, 31)] == pytest.approx([100.0] * 30)
    assert speed.at(40.0, 3000) < 10  # nothing has come for ten seconds


def test_the_wait_for_the_first_bytes_does_not_count():
    speed = DownloadSpeed()
    assert [speed.at(float(second), 0) for second in range(8)] == [0.0] * 8
    assert speed.at(8.0, 100) == 100.0


def test_the_size_is_said_first_and_the_end_at_once(logged):
    lines = Lines(1, 2_500_000, LineStyle(every_s=60.0))
    lines.received("a", 2_500_000)
    lines.finished("a")
    lines.close()
    assert logged.messages[0] == "Downloading 1 file, 2.5 MB"
    assert logged.messages[1].startswith("Download: [1/1] -- ETA: 0:00:00 -- 2.5 MB of 2.5 MB, ")
    assert len(logged.messages) == 2


def test_lines_come_regularly_with_the_time_left_and_without_bytes_of_earlier_tries(logged, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    lines = Lines(2, 1000, LineStyle(every_s=0.01, has_fields=True))
    lines.received("a", 500)  # held before
    now_s = 102.0
    lines.received("a", 600)
    wait_for(lambda: any("received_bytes" in vars(record).get("fields", {}) for record in logged.records))
    lines.close()
    fields = [record.fields for record in logged.records if getattr(record, "fields", None)][-1]
    assert fields == {"received_bytes": 600, "total_bytes": 1000, "bytes_per_s": 50, "left_s": 8}
    assert json.dumps(fields) and "[0/2] -- ETA: 0:00:08 -- 600 B of 1.0 kB, 50 B/s" in logged.messages[-1]


def wait_for(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("no line in time")


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (16.1e9, "16.1 GB"), (2e12, "2000.0 GB")]
)
def test_sizes_have_units(num_bytes, text):
    assert sized(num_bytes) == text
