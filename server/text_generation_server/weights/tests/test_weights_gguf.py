"""A GGUF file of a repository on the hub: which is fetched, and found again, or refused when its beginning has arrived.
With a fake hub on loopback.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from gguf_headers import PIECES
from gguf_writer import write_gguf

from text_generation_common.errors import WeightsError
from text_generation_common.gguf.container import ARRAY, TEXT
from text_generation_server.weights.files import HubAccess
from text_generation_server.weights.hub import download, resolve
from text_generation_server.weights.transfer import Retries

U16, U32, I32, F32 = 2, 4, 5, 6
TEXTS, SCORES, KINDS = map(list, zip(*PIECES, strict=True))
KEYS: dict[str, Any] = {
    "general.architecture": (TEXT, "llama"),
    "llama.block_count": (U32, 1),
    "llama.embedding_length": (U32, 8),
    "llama.attention.head_count": (U32, 2),
    "tokenizer.ggml.model": (TEXT, "llama"),
    "tokenizer.ggml.tokens": (ARRAY, (TEXT, TEXTS)),
    "tokenizer.ggml.scores": (ARRAY, (F32, SCORES)),
    "tokenizer.ggml.token_type": (ARRAY, (I32, KINDS)),
}


def content(changes: dict[str, Any] | None = None, others: int = 1) -> bytes:
    """`others`: rows of a further tensor."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "model.gguf")
        tensors = {"token_embd.weight": torch.ones(len(PIECES), 8), "output_norm.weight": torch.ones(others, 8)}
        write_gguf(file, KEYS | (changes or {}), tensors)
        return file.read_bytes()


def part(number: int) -> bytes:
    with TemporaryDirectory() as folder:
        file = Path(folder, "model.gguf")
        keys = {"split.no": (U16, number), "split.count": (U16, 2), "split.tensors.count": (I32, 2)}
        write_gguf(file, (KEYS if not number else {}) | keys, {f"t{number}": torch.ones(8)})
        return file.read_bytes()


LISTING = {
    "README.md": b"#",
    "config.json": b"{}",
    "m-Q4_K_M.gguf": content(),
    "m-Q8_0.gguf": content(),
    "mmproj-m-Q8_0.gguf": b"GGUF p",
    "m.imatrix.gguf": b"GGUF i",
    "F16/m-F16-00001-of-00002.gguf": part(0),
    "F16/m-F16-00002-of-00002.gguf": part(1),
}


@pytest.fixture
def fetch(asking_hub, tmp_path, Model):
    """Downloads a model id from a hub that has LISTING and other files as `org/name`. The names of files fetched."""
    hub, access = asking_hub, HubAccess(cache_dir=tmp_path)

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


LARGE = 2**17  # rows: the file is larger than what may arrive
NOT_SERVED = {
    "the architecture mamba is not supported": {"general.architecture": (TEXT, "mamba")},
    r"the key llama\.attention\.clamp_kqv is 8\.0": {"llama.attention.clamp_kqv": (F32, 8.0)},
    "a tokenizer of the kind bert": {"tokenizer.ggml.model": (TEXT, "bert")},
    "it has 1 tokens, and 265 rows": {"tokenizer.ggml.tokens": (ARRAY, (TEXT, ["a"]))},
}


@pytest.mark.parametrize("told", NOT_SERVED)
def test_a_file_that_is_not_served_is_refused_when_its_header_is_there(fetch, hub, monkeypatch, tmp_path, told):
    hub.stall_after["m-Q8_0.gguf"] = 2 * 2**20
    monkeypatch.setitem(LISTING, "m-Q8_0.gguf", content(NOT_SERVED[told], LARGE))
    with pytest.raises(WeightsError, match=rf"^m-Q8_0\.gguf.*{told}"):
        fetch("org/name:Q8_0")
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) == 0


def test_a_beginning_without_the_whole_header_is_looked_at_again(fetch, monkeypatch):
    monkeypatch.setattr("text_generation_server.weights.transfer.CHUNK_BYTES", 1000)
    monkeypatch.setattr("text_generation_server.weights.transfer.FIRST_LOOK", 10)
    assert fetch("org/name:Q8_0") == ["m-Q8_0.gguf"]
