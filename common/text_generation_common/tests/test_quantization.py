"""Quantized checkpoints are recognised by fields of their files, and refused with the format's name."""

import json
import os

import pytest

from text_generation_common.quantization import format_name, refusal

# For each format: the settings that tools write into a checkpoint, reduced to the fields that name the format.
ANNOUNCEMENTS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
    "gptq (gptq_v2)": {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4},
    "awq (gemm)": {"quant_method": "awq", "version": "gemm", "bits": 4, "zero_point": True},
    "compressed-tensors (pack-quantized)": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"]}},
    },
    "compressed-tensors (float-quantized)": {"format": "float-quantized", "config_groups": {}},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    "bitsandbytes (nf4)": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes": {"load_in_8bit": True},
    "modelopt (FP8)": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "mxfp4": {"quant_method": "mxfp4"},
    "eetq": {"quant_method": "eetq"},
    "a new one": {"quant_method": "a new one"},
    "an unknown format": {"anything": 1},
    '"two\\nlines"': {"quant_method": "two\nlines"},
}


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
