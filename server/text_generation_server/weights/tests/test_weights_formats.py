"""Weights in formats that are not supported are refused, with the tensor's name and the format."""

import json

import pytest
import torch
from safetensors.torch import save_file

from text_generation_common.errors import WeightsError
from text_generation_common.weights.headers import verify
from text_generation_server.weights.files import SafetensorsFiles

WEIGHT = "model.layers.0.mlp.up_proj.weight"


def refusal(folder, tensors) -> str:
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError) as refused:
        verify(folder)
    with pytest.raises(WeightsError):
        SafetensorsFiles(folder)
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


@pytest.mark.parametrize(
    ("type", "called"),
    [
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.float8_e5m2, "float8_e5m2"),
        (torch.int8, "int8"),
        (torch.uint8, "uint8"),
        (torch.int32, "int32"),
        (torch.int64, "int64"),
        (torch.bool, "bool"),
    ],
)
def test_a_weight_of_a_type_that_is_not_served_is_named_with_its_type(tmp_path, type, called):
    told = refusal(tmp_path, {WEIGHT: torch.ones(4, 4).to(type)})
    assert f"the tensor {WEIGHT} is stored as {called}, which is not supported yet" in told


@pytest.mark.parametrize("type", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_the_types_of_training_are_served(tmp_path, type):
    (tmp_path / "config.json").write_text("{}")
    save_file({WEIGHT: torch.ones(4, 4).to(type)}, tmp_path / "model.safetensors")
    verify(tmp_path)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        (f"{WEIGHT}_scale", "fp8 or compressed-tensors"),
        (f"{WEIGHT}_scale_inv", "fp8"),
        (f"{WEIGHT}_packed", "compressed-tensors"),
        (f"{WEIGHT}_shape", "compressed-tensors"),
        (f"{WEIGHT}_zero_point", "compressed-tensors"),
        (f"{WEIGHT}.absmax", "bitsandbytes"),
        (f"{WEIGHT}.quant_state.bitsandbytes__nf4", "bitsandbytes"),
        ("model.layers.0.mlp.up_proj.SCB", "bitsandbytes"),
        ("model.layers.0.mlp.up_proj.input_scale", "fp8 or compressed-tensors"),
        ("model.layers.0.mlp.up_proj.qweight", "gptq or awq"),
        ("model.layers.0.mlp.up_proj.qzeros", "gptq or awq"),
        ("model.layers.0.mlp.up_proj.scales", "gptq or awq"),
        ("model.layers.0.mlp.up_proj.g_idx", "gptq"),
        ("model.layers.0.self_attn.k_scale", "a quantized KV cache"),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "mxfp4"),
    ],
)
def test_a_tensor_beside_quantized_weights_is_named_with_its_format(tmp_path, name, format):
    told = refusal(tmp_path, {WEIGHT: torch.ones(4, 4), name: torch.ones(4)})
    assert f"the tensor {name} belongs to weights quantized as {format}, which is not supported yet" in told


def test_the_format_that_config_json_announces_is_named(tmp_path):
    save_file({WEIGHT: torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(WeightsError, match="quantized as awq, which is not supported yet"):
        verify(tmp_path)
