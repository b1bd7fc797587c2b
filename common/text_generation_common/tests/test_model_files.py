"""Small files of a model are read whole, or refused before they cost memory or time."""

import os
from pathlib import Path

import pytest

from text_generation_common import model_files
from text_generation_common.model_files import (
    MissingFileError,
    ModelFileError,
    find_json_object,
    is_hub_id,
    is_meant_as_path,
    local_folder,
    read_json_object,
    read_model_file,
    served_name,
)


def test_a_regular_file_is_read_whole_up_to_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "LIMIT_MIB", 1)
    file = tmp_path / "config.json"
    for size in (0, 1, 2**20):
        file.write_bytes(b"x" * size)
        assert read_model_file(file) == b"x" * size
    file.write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(ModelFileError, match=r"larger than 1 MiB"):
        read_model_file(file)


def test_ten_gigabytes_are_refused(tmp_path):
    file = tmp_path / "tokenizer.json"
    with file.open("wb") as stream:
        stream.truncate(10**10)  # a sparse file, which takes no disk space
    with pytest.raises(ModelFileError, match=r"larger than 256 MiB"):
        read_model_file(file)


def test_a_file_that_reports_no_size_is_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "LIMIT_MIB", 0)
    with pytest.raises(ModelFileError, match="larger than 0 MiB"):
        read_model_file(Path("/proc/self/status"))


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="Is a directory"):
        read_model_file(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_pipes_and_devices_are_refused_at_once(tmp_path, make):
    path = tmp_path / "config.json"
    make(path)
    for read in (read_model_file, read_json_object, find_json_object):
        with pytest.raises(ModelFileError) as refused:
            read(path)
        assert str(refused.value) == f"{path} cannot be read (not a regular file): repair it, or download it again"


def test_an_absent_file_is_reported_as_absent(tmp_path):
    for read in (read_model_file, read_json_object):
        with pytest.raises(MissingFileError) as refused:
            read(tmp_path / "config.json")
        assert str(refused.value) == f"{tmp_path} has no config.json: is it the directory of a model?"
    assert find_json_object(tmp_path / "config.json") is None


def test_an_object_is_read_in_every_encoding_of_json(tmp_path):
    file = tmp_path / "config.json"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        file.write_text('{"a": [1, "é"]}', encoding)
        assert read_json_object(file) == find_json_object(file) == {"a": [1, "é"]}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[]", "does not hold a JSON object"),
        (b"null", "does not hold a JSON object"),
    ],
    ids=["empty", "cut", "no text", "deep", "long number", "list", "null"],
)
def test_a_file_without_a_json_object_is_named_in_one_line(tmp_path, content, told):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    for read in (read_json_object, find_json_object):
        with pytest.raises(ModelFileError) as refused:
            read(file)
        assert str(refused.value).startswith(f"{file} {told}") and len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("model_id", ["gpt2", "owner/name", "Owner_1/na.me-2"])
def test_ids_of_the_hub_are_not_meant_as_paths(model_id: str) -> None:
    assert is_hub_id(model_id) and not is_meant_as_path(model_id)


@pytest.mark.parametrize("model_id", ["/no/model", "./model", "../up", "~/model", "a/b/c"])
def test_paths_are_not_ids_of_the_hub(model_id: str) -> None:
    assert is_meant_as_path(model_id) and not is_hub_id(model_id)


@pytest.mark.parametrize("model_id", ["", "x y", "..", "a/..", "owner/", "modèle"])
def test_other_texts_are_neither(model_id: str) -> None:
    assert not is_meant_as_path(model_id) and not is_hub_id(model_id)


def test_a_folder_is_found_by_its_path_and_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "file").touch()
    assert local_folder(str(tmp_path / "model")) == local_folder("~/model") == tmp_path / "model"
    assert [local_folder(name) for name in ("~/file", "~/none", "~no-such-user/model")] == [None, None, None]


def test_the_name_for_clients_is_given_or_the_id_or_the_folder_s_and_never_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my-llama"
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "0a1b2c"
    for path in (folder, snapshot):
        path.mkdir(parents=True)
    monkeypatch.chdir(folder)
    names = {"owner/name": "owner/name", "gpt2": "gpt2"}
    names |= {str(folder): "my-llama", f"{folder}/": "my-llama", ".": "my-llama", str(snapshot): "owner/name"}
    assert {model_id: served_name(None, model_id) for model_id in names} == names
    assert served_name("mine", str(folder)) == served_name("mine", "owner/name") == "mine"
