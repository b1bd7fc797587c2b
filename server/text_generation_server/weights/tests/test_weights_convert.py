"""Converting PyTorch's files to safetensors gives the same tensors, each stored once, in complete files or in none."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from text_generation_common.errors import WeightsError
from text_generation_common.weights.headers import verify, weight_files
from text_generation_server.weights.convert import WORK_FOLDER, convert, convert_apart
from text_generation_server.weights.files import SafetensorsFiles


def test_tied_tensors_are_stored_once_and_read_under_both_names(tmp_path):
    embedding = torch.randn(100, 8)
    torch.save({"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}, tmp_path / "pytorch_model.bin")
    convert(tmp_path, tmp_path)
    files = SafetensorsFiles(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 2 * embedding.nbytes
    assert torch.equal(files.get("model.embed_tokens.weight"), embedding)
    assert torch.equal(files.get("lm_head.weight"), embedding)


def test_views_transposed_parameters_and_empty_tensors_keep_their_values(tmp_path):
    whole = torch.arange(24.0).view(4, 6)
    tensors = {
        "whole": whole,
        "rows": whole[1:3],
        "transposed": whole.T,
        "parameter": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "none": torch.zeros(0),
        "none too": torch.zeros(0),
    }
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    convert(tmp_path, tmp_path)
    files = SafetensorsFiles(tmp_path)
    assert files.names == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(files.get(name), tensor) and files.get(name).dtype == tensor.dtype


def test_files_of_old_pytorch_are_converted_too(tmp_path):
    torch.save({"w": torch.arange(5.0)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    convert(tmp_path, tmp_path)
    assert torch.equal(SafetensorsFiles(tmp_path).get("w"), torch.arange(5.0))


@pytest.fixture
def two_parts(tmp_path):
    names = {f"w{i}": f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)}
    for i, (name, file) in enumerate(names.items()):
        torch.save({name: torch.full((3,), float(i))}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    return tmp_path


def test_parts_become_parts_with_an_index(two_parts):
    convert(two_parts, two_parts)
    assert [file.name for file in weight_files(two_parts)] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert torch.equal(SafetensorsFiles(two_parts).get("w2"), torch.full((3,), 1.0))
    assert not (two_parts / WORK_FOLDER).exists()


def test_a_missing_part_is_named_and_nothing_is_written(two_parts):
    (two_parts / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(WeightsError, match=r"pytorch_model-00002-of-00002\.bin is missing"):
        convert(two_parts, two_parts)
    assert list(two_parts.glob("*.safetensors")) == []


def test_a_conversion_killed_while_moving_is_not_taken_for_done_and_is_done_again(two_parts):
    convert(two_parts, two_parts)
    (two_parts / "model-00002-of-00002.safetensors").unlink()  # as if the conversion had been killed between two moves
    with pytest.raises(WeightsError, match="is missing"):
        weight_files(two_parts)
    convert(two_parts, two_parts)
    assert len(weight_files(two_parts)) == 2


def test_a_conversion_killed_while_writing_leaves_nothing_that_looks_finished(tmp_path):
    tensors = {
        f"w{i}": torch.full((1 << 22,), float(i)) for i in range(4)
    }  # 64 MiB, so that writing takes long enough for the kill
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    command = [sys.executable, "-m", "text_generation_server.weights.convert", str(tmp_path), str(tmp_path)]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 30
        while not (tmp_path / WORK_FOLDER).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / WORK_FOLDER).exists()
    with pytest.raises(WeightsError, match=r"has no \.safetensors weights"):
        weight_files(tmp_path)
    convert_apart(tmp_path, tmp_path)
    assert torch.equal(SafetensorsFiles(tmp_path).get("w3"), tensors["w3"])


class _NotATensor:
    pass


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"w": _NotATensor()}, "was refused: its pickle asks for .*_NotATensor"),
        ({"state_dict": {"w": torch.zeros(1)}}, "flat dictionary of tensors"),
        ([torch.zeros(1)], "flat dictionary of tensors"),
    ],
)
def test_a_file_with_more_than_tensors_is_refused(tmp_path, content, named):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=named) as refused:
        convert(tmp_path, tmp_path)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.glob("*.safetensors")) == []


@pytest.mark.parametrize("keep", [0, 10, -20])
def test_a_truncated_file_is_named(tmp_path, keep):
    file = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.zeros(1000)}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin") as refused:
        convert(tmp_path, tmp_path)
    assert "\n" not in str(refused.value)


# Weights in formats that are not supported are refused, with the tensor's name and the format.
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
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "aqlm"}}))
    with pytest.raises(WeightsError, match="quantized as aqlm, which is not supported: "):
        verify(tmp_path)
