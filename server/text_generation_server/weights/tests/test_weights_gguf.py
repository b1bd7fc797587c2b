"""A GGUF file of a repository on the hub: which is fetched, and found again. With a fake hub on loopback."""

import pytest

from text_generation_common.errors import WeightsError
from text_generation_server.weights.files import HubAccess
from text_generation_server.weights.hub import download, resolve
from text_generation_server.weights.transfer import Retries

LISTING = {
    "README.md": b"#",
    "config.json": b"{}",
    "m-Q4_K_M.gguf": b"GGUF 4",
    "m-Q8_0.gguf": b"GGUF 8",
    "mmproj-m-Q8_0.gguf": b"GGUF p",
    "m.imatrix.gguf": b"GGUF i",
    "F16/m-F16-00001-of-00002.gguf": b"GGUF 1",
    "F16/m-F16-00002-of-00002.gguf": b"GGUF 2",
}


@pytest.fixture
def fetch(hub, tmp_path, monkeypatch, Model):
    """Downloads a model id from a hub that has LISTING and other files as `org/name`. The names of files fetched."""
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    access = HubAccess(cache_dir=tmp_path)

    def fetch(model_id: str, **others: bytes) -> list[str]:
        hub.models["org/name"] = Model({"main": LISTING | others})
        path = download(model_id, None, access, retries=Retries(tries=1))
        assert resolve(model_id, None, access) == path
        names = [name for method, name, _ in hub.log if method == "GET" and name in LISTING | others]
        hub.log.clear()
        return names

    return fetch


@pytest.mark.parametrize(
    "model_id, files",
    [
        ("org/name", ["m-Q4_K_M.gguf"]),
        ("org/name:q8_0", ["m-Q8_0.gguf"]),
        ("hf.co/org/name:m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        ("org/name:F16", ["F16/m-F16-00001-of-00002.gguf", "F16/m-F16-00002-of-00002.gguf"]),
    ],
)
def test_the_chosen_file_and_its_parts_are_fetched_and_no_other(fetch, model_id, files):
    assert sorted(fetch(model_id)) == files
    assert fetch(model_id) == []


def test_a_file_that_is_not_there_is_an_error_with_the_list(fetch):
    with pytest.raises(WeightsError, match=r"no GGUF file of Q2_K: pass .* one of F16, Q4_K_M, Q8_0$"):
        fetch("org/name:Q2_K")


def test_a_part_that_is_missing_is_named_before_anything_is_fetched(fetch, hub, monkeypatch):
    monkeypatch.delitem(LISTING, "F16/m-F16-00002-of-00002.gguf")
    with pytest.raises(WeightsError, match=r"org/name has no F16/m-F16-00002-of-00002\.gguf, which"):
        fetch("org/name:F16")
    assert not [name for method, name, _ in hub.log if method == "GET" and name.endswith(".gguf")]
