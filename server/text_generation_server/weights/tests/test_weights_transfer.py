"""Downloading one file: which bytes are kept or dropped, and which errors lead to another try."""

import hashlib
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from text_generation_common.errors import WeightsError
from text_generation_server.errors import NetworkError, SilentHub
from text_generation_server.weights import progress
from text_generation_server.weights.files import LineStyle
from text_generation_server.weights.progress import DownloadSpeed, Lines, Quiet, sized
from text_generation_server.weights.transfer import Blob, Retries, fetch_all

CONTENT = bytes(range(256)) * 12_000  # 3 MB of content
NAME = "model.safetensors"
AT_ONCE = Retries(pause_s=0.0)
ONE_TRY = Retries(tries=1)


@pytest.fixture
def blob(hub, Model, tmp_path):
    hub.models["m"] = Model({"main": {NAME: CONTENT}})
    digest = hashlib.sha256(CONTENT).hexdigest()
    return Blob(NAME, f"{hub.url}/m/resolve/main/{NAME}", tmp_path / "blobs" / digest, len(CONTENT), digest)


def fetch(blob, retries=AT_ONCE):
    fetch_all([blob], {}, Quiet(), retries)


def test_a_broken_connection_is_continued_at_its_last_byte(hub, blob):
    hub.cut_after[NAME] = 2_000_000
    fetch(blob)
    first, second = hub.gets(NAME)
    assert first is None and int(second.removeprefix("bytes=").removesuffix("-")) >= 1 << 20
    assert blob.path.read_bytes() == CONTENT and not blob.partial.exists()


def test_a_busy_hub_costs_none_of_what_was_received(hub, blob):
    blob.path.parent.mkdir()
    blob.partial.write_bytes(CONTENT[:1000])
    hub.statuses[NAME] = [503, 429]
    fetch(blob)
    assert hub.gets(NAME) == ["bytes=1000-"] * 3
    assert blob.path.read_bytes() == CONTENT


def test_a_server_that_ignores_ranges_is_read_from_the_start(hub, blob):
    blob.path.parent.mkdir()
    blob.partial.write_bytes(b"x" * 1000)
    hub.ignores_range = True
    fetch(blob, ONE_TRY)
    assert blob.path.read_bytes() == CONTENT


@pytest.mark.parametrize("partial", [b"x" * 1000, CONTENT + b"x", b"x" * len(CONTENT)], ids=["short", "long", "full"])
def test_a_partial_file_that_is_wrong_never_becomes_the_file(hub, blob, partial):
    blob.path.parent.mkdir()
    blob.partial.write_bytes(partial)
    with pytest.raises(NetworkError):
        fetch(blob, ONE_TRY)
    assert not blob.path.exists()
    fetch(blob, ONE_TRY)
    assert blob.path.read_bytes() == CONTENT


def test_damage_on_the_way_is_found_and_fetched_again(hub, blob):
    hub.damage.add(NAME)
    with pytest.raises(NetworkError, match="arrived damaged"):
        fetch(blob, ONE_TRY)
    assert not blob.path.exists()
    fetch(blob, ONE_TRY)
    assert blob.path.read_bytes() == CONTENT


def test_only_network_errors_are_tried_again(hub, blob):
    hub.statuses[NAME] = [403, 403]
    with pytest.raises(WeightsError, match="answered 403") as refused:
        fetch(blob)
    assert not isinstance(refused.value, NetworkError)
    assert len(hub.gets(NAME)) == 1


def test_the_hub_is_asked_five_times_in_all(hub, blob):
    hub.statuses[NAME] = [503] * 9
    with pytest.raises(NetworkError, match="answered 503"):
        fetch(blob)
    assert len(hub.gets(NAME)) == 5


def test_an_unreachable_hub_is_a_network_error_in_one_line(blob):
    with pytest.raises(NetworkError) as failed:
        fetch(replace(blob, url="http://127.0.0.1:1/x"), ONE_TRY)
    assert "\n" not in str(failed.value) and NAME in str(failed.value)


def test_retries_pause_between_tries_and_not_after_the_last():
    pauses: list[float] = []

    def fail() -> None:
        raise NetworkError("no")

    with pytest.raises(NetworkError):
        Retries().run(fail, sleep=pauses.append)
    assert pauses == [5.0] * 4


def test_a_hub_that_never_answers_is_told_after_two_tries_and_one_that_fails_later_after_five():
    calls: list[type[NetworkError]] = []

    def fail(kind: type[NetworkError]) -> None:
        calls.append(kind)
        raise kind("no")

    for kind, tries in ((SilentHub, 2), (NetworkError, 5)):
        with pytest.raises(kind):
            Retries().run(partial(fail, kind), sleep=lambda seconds: None)
        assert calls.count(kind) == tries
    silent_once = iter([SilentHub("no"), NetworkError("no"), NetworkError("no"), NetworkError("no"), None])

    def answer_at_last() -> None:
        if (error := next(silent_once)) is not None:
            raise error

    Retries().run(answer_at_last, sleep=lambda seconds: None)


def test_two_downloads_of_one_file_fetch_it_once(hub, blob):
    hub.stall_after[NAME] = 2_000_000
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(fetch, blob) for _ in range(2)]
        deadline = time.monotonic() + 20
        while not (blob.partial.exists() and blob.partial.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
        hub.stall_after.clear()
        hub.released.set()
        for job in jobs:
            job.result(timeout=20)
    assert blob.path.read_bytes() == CONTENT
    # The second request continues the file that was cut off.
    assert hub.gets(NAME)[0] is None and len(hub.gets(NAME)) == 2


def test_the_first_error_stops_the_other_files(hub, Model, tmp_path, blob):
    hub.models["m"].revisions["main"]["other.bin"] = CONTENT
    other = Blob("other.bin", f"{hub.url}/m/resolve/main/other.bin", tmp_path / "blobs" / "other", len(CONTENT), None)
    hub.stall_after[NAME] = 1 << 21
    hub.statuses["other.bin"] = [404]
    releaser = threading.Timer(0.5, hub.released.set)
    releaser.start()
    with pytest.raises(WeightsError, match="answered 404"):
        fetch_all([blob, other], {}, Quiet(), AT_ONCE)
    releaser.join()
    assert not blob.path.exists()
    assert len(hub.gets(NAME)) == 1


def test_too_small_a_disk_is_refused_before_anything_is_fetched(hub, blob):
    with pytest.raises(WeightsError, match="GB free"):
        fetch(replace(blob, size=1 << 60))
    assert hub.log == []


def test_each_try_that_fails_is_a_line_with_the_reason_and_the_next_unless_the_hub_has_never_answered(caplog):
    def fail(kind: type[NetworkError]) -> None:
        raise kind("the hub cannot be reached (refused): check the connection")

    caplog.set_level("INFO")
    for kind in (NetworkError, SilentHub):
        with pytest.raises(kind):
            Retries(tries=3, pause_s=0.5).run(partial(fail, kind), sleep=lambda seconds: None)
    first = "the hub cannot be reached (refused): try 2 of 3 follows in 0.5 s"
    assert caplog.messages == [first, first.replace("try 2", "try 3")]


# Lines about a download: bytes, speed and time left, also of a single file and while nothing arrives.
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
    fields = {"received_bytes": 600, "total_bytes": 1000, "bytes_per_s": 50, "left_s": 8}
    wait_for(lambda: any(vars(record).get("fields") == fields for record in logged.records))
    lines.close()
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
