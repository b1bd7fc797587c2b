"""Quantized checkpoints are recognised by fields of their files, and refused with the format's name."""

import json
import os
from pathlib import Path

import pytest

from text_generation_common.quantization import format_name, refusal

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

# For each format: the settings that tools write into a checkpoint, reduced to the fields that name the format.
ANNOUNCEMENTS = TABLES["announcements"]


@pytest.mark.parametrize(("name", "settings"), ANNOUNCEMENTS.items(), ids=str)
def test_every_way_to_name_a_format_is_read(name, settings):
    assert format_name(settings) == name


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_a_field_of_config_json_names_the_format(tmp_path, field):
    told = refusal(tmp_path, {field: {"quant_method": "gptq"}})
    assert told and "\n" not in told and "config.json" in told and "quantized as gptq, which is not supported" in told
    assert refusal(tmp_path, {field: None}) is None and refusal(tmp_path, {}) is None
    for odd in ("gptq", [1], 4, True, {"quant_method": ["a", "b"]}, {"quant_method": 7, "bits": 4}):
        assert "\n" not in str(refusal(tmp_path, {field: odd}))


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, "awq (GEMM)"),
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}},
            "modelopt (NVFP4)",
        ),
    ],
)
def test_a_file_beside_config_json_names_the_format(tmp_path, file, content, name):
    (tmp_path / file).write_text(json.dumps(content))
    told = refusal(tmp_path, {})
    assert told and f"{tmp_path / file}: the weights are quantized as {name}, which" in told


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.write_bytes(b"{")])
def test_a_file_that_cannot_be_read_is_refused_as_an_unknown_format(tmp_path, make):
    make(tmp_path / "quantize_config.json")
    assert "an unknown format" in str(refusal(tmp_path, {}))
