"""The digest of a model: it changes with everything that decides tokens, and with nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from text_generation_common.errors import WeightsError
from text_generation_common.quantized.served import VERSIONS
from text_generation_common.weights import digest
from text_generation_common.weights.digest import BLOCK_BYTES, model_digest

SETTINGS = {"dtype": "torch.bfloat16", "kernels": "c-avx2"}
VALUES = 40 * BLOCK_BYTES


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "a"}')
    header = json.dumps({"w": {"dtype": "U8", "shape": [VALUES], "data_offsets": [0, VALUES]}}).encode()
    body = bytes(number % 251 for number in range(VALUES))
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
    return folder


def _append(name: str, more: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + more)


def _patch(place: int) -> Callable[[Path], None]:
    """Changes a byte of the weights, counted from the end."""

    def patch(folder: Path) -> None:
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-place] ^= 255
        (folder / "model.safetensors").write_bytes(data)

    return patch


CHANGES: dict[str, Callable[[Path], object]] = {
    "config": _append("config.json", " "),
    "generation config": lambda folder: (folder / "generation_config.json").write_text("{}"),
    "tokenizer": _append("tokenizer.json", " "),
    "header": lambda folder: _rename(folder, b'"w"', b'"v"'),
    "first weight": _patch(VALUES),
    "last weight": _patch(1),
    "another file": lambda folder: (folder / "model.safetensors").rename(folder / "weights.safetensors"),
}


def _rename(folder: Path, old: bytes, new: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(old, new, 1))


def test_copies_of_a_model_have_one_digest_whatever_their_template_and_place(tmp_path: Path) -> None:
    first, second = make_model(tmp_path / "a"), make_model(tmp_path / "b")
    (second / "tokenizer_config.json").write_text('{"chat_template": "b"}')
    assert model_digest(first, SETTINGS) == model_digest(second, dict(reversed(SETTINGS.items())))
    assert len(model_digest(first, SETTINGS)) == 32


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_of_a_file_changes_the_digest(tmp_path: Path, name: str) -> None:
    folder = make_model(tmp_path / "model")
    before = model_digest(folder, SETTINGS)
    CHANGES[name](folder)
    assert model_digest(folder, SETTINGS) != before


def test_settings_and_the_version_of_the_numerics_change_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "model")
    found = [model_digest(folder, settings) for settings in (SETTINGS, {}, SETTINGS | {"dtype": "torch.float32"})]
    monkeypatch.setattr(digest, "NUMERICS_VERSION", digest.NUMERICS_VERSION + 1)
    assert len({*found, model_digest(folder, SETTINGS)}) == 4


def test_the_version_of_a_format_changes_the_digest_of_weights_in_this_format_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, packed = make_model(tmp_path / "plain"), make_model(tmp_path / "packed")
    (packed / "config.json").write_text('{"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}')
    before = [model_digest(folder, SETTINGS) for folder in (plain, packed)]
    monkeypatch.setattr(digest, "VERSIONS", dict.fromkeys(VERSIONS, 77))
    after = [model_digest(folder, SETTINGS) for folder in (plain, packed)]
    assert before[0] == after[0] and before[1] != after[1]


def test_few_bytes_of_large_weights_are_read(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    read = sum(len(data) for _, data in digest._samples(folder / "model.safetensors"))
    assert read < VALUES / 2


def test_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(WeightsError):
        model_digest(tmp_path, SETTINGS)
