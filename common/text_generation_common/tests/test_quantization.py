"""Quantized checkpoints are served, or refused in one line with the format's name and a way out, by their settings."""

import json
import os
from pathlib import Path

import pytest

from text_generation_common.quantized.methods import REFUSED
from text_generation_common.quantized.served import refusal, served_method

# For each format: the settings that tools write into a checkpoint, reduced to the fields that name the format.
TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(("name", "settings"), TABLES["refused"].items(), ids=str)
def test_what_is_not_served_is_refused_by_its_name(tmp_path, name, settings):
    told = refusal(tmp_path, {"model_type": "llama", "quantization_config": settings})
    assert told and "\n" not in told
    assert (
        told.startswith(f"{tmp_path / 'config.json'}: ") and f": the weights are quantized as {name}, which is " in told
    )
    assert told.count(": ") >= 2 and served_method(tmp_path, {"quantization_config": settings}) is None


@pytest.mark.parametrize(("method", "settings"), TABLES["served"].items(), ids=str)
def test_what_is_served_has_its_method(tmp_path, method, settings):
    config = {"model_type": "gpt_oss", "quantization_config": settings}
    assert refusal(tmp_path, config) is None and served_method(tmp_path, config) == method


@pytest.mark.parametrize("method", REFUSED)
def test_every_method_that_is_known_and_not_read_has_a_way_out(tmp_path, method):
    told = refusal(tmp_path, {"quantization_config": {"quant_method": method}})
    assert told and told.endswith(REFUSED[method])


def test_a_model_decides_too(tmp_path):
    config = {"model_type": "llama", "quantization_config": GPTQ}
    assert refusal(tmp_path, config) is None
    assert refusal(tmp_path, config | {"num_local_experts": 0, "num_experts_per_tok": 2}, is_ours=False) is None
    for experts in ({"n_routed_experts": 8}, {"ffn_config": {"moe_num_experts": 8}}):
        told = str(refusal(tmp_path, config | experts, is_ours=False))
        assert "gptq, which is not supported for the experts of a model that transformers computes: choose" in told
    mxfp4 = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    assert "for a model that transformers computes: choose the" in str(refusal(tmp_path, mxfp4, is_ours=False))
    assert refusal(tmp_path, mxfp4) is None
    assert "mxfp4, which is supported for model type gpt_oss only" in str(
        refusal(tmp_path, mxfp4 | {"model_type": "llama"})
    )


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_odd_settings_are_refused_in_one_line(tmp_path, field):
    assert refusal(tmp_path, {field: None}) is None and refusal(tmp_path, {}) is None
    for odd in ("gptq", [1], 4, True, {"quant_method": ["a", "b"]}, {"quant_method": 7, "bits": 4}):
        told = refusal(tmp_path, {field: odd})
        assert told and "\n" not in told


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "is_marlin_format": True}, "gptq (marlin)"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMV"}, "awq (gemv)"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "W4A8_AWQ"}}, "modelopt (W4A8_AWQ)"),
    ],
)
def test_a_file_beside_config_json_names_the_format(tmp_path, file, content, name):
    (tmp_path / file).write_text(json.dumps(content))
    told = refusal(tmp_path, {})
    assert told and f"{tmp_path / file}: the weights are quantized as {name}, which" in told


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.write_bytes(b"{")])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, make):
    make(tmp_path / "quantize_config.json")
    assert str(tmp_path / "quantize_config.json") in str(refusal(tmp_path, {}))
