"""Small files of a model are read whole, or refused before they cost memory or time."""

import os
from pathlib import Path

import pytest

from text_generation_common import model_files
from text_generation_common.model_files import read_model_file


def test_a_regular_file_is_read_whole_up_to_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "LIMIT_MIB", 1)
    file = tmp_path / "config.json"
    for size in (0, 1, 2**20):
        file.write_bytes(b"x" * size)
        assert read_model_file(file) == b"x" * size
    file.write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(OSError) as refused:
        read_model_file(file)
    assert refused.value.strerror == "larger than 1 MiB"


def test_ten_gigabytes_are_refused(tmp_path):
    file = tmp_path / "tokenizer.json"
    with file.open("wb") as stream:
        stream.truncate(10**10)  # a sparse file, which takes no disk space
    with pytest.raises(OSError) as refused:
        read_model_file(file)
    assert refused.value.strerror == "larger than 256 MiB"


def test_a_file_that_reports_no_size_is_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "LIMIT_MIB", 0)
    with pytest.raises(OSError, match="larger than 0 MiB"):
        read_model_file(Path("/proc/self/status"))


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_model_file(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_pipes_and_devices_are_refused_at_once(tmp_path, make):
    path = tmp_path / "config.json"
    make(path)
    with pytest.raises(OSError) as refused:
        read_model_file(path)
    assert refused.value.strerror == "not a regular file"


def test_an_absent_file_is_reported_as_absent(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_model_file(tmp_path / "config.json")
