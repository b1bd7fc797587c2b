from pathlib import Path

import pytest

from text_generation_common.model_folder import is_hub_id, is_meant_as_path, local_folder, served_name


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
