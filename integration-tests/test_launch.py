"""Starting and stopping a server, as an operator sees it."""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import processes
import pytest
from calls import DEMO_MODEL
from server_process import ServerProcess, free_port


def run_to_its_end(server: ServerProcess) -> tuple[int, str]:
    """(exit status, output) of a launch that is expected to fail."""
    environment = os.environ | server.command.environment
    result = subprocess.run(server.command.arguments, capture_output=True, text=True, timeout=60, env=environment)
    return result.returncode, result.stdout + result.stderr


def test_a_second_launch_on_the_same_sockets_or_port_is_refused_in_one_line(server: ServerProcess) -> None:
    for second, named in (
        (ServerProcess(uds_path=server.uds_path, port=free_port()), server.uds_path),
        (ServerProcess(port=server.port), str(server.port)),
    ):
        status, output = run_to_its_end(second)
        error, hint = [line for line in output.splitlines() if "INFO" not in line]
        assert status == 1 and error.startswith("error: ") and hint.startswith("hint: ") and named in error


def broken_copy(folder: Path, breakage: str) -> Path:
    model = folder / "model"
    shutil.copytree(DEMO_MODEL, model, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    weights = model / "model.safetensors"
    if breakage == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif breakage == "garbage header":
        weights.write_bytes(b"\xff" * 1000)
    elif breakage == "no tokenizer.json":
        (model / "tokenizer.json").unlink()
    elif breakage == "no config.json":
        (model / "config.json").unlink()
    elif breakage == "unreadable tokenizer":
        (model / "tokenizer.json").write_text('{"model": {"type": "X"}}')
    elif breakage == "broken template":
        (model / "chat_template.jinja").write_text("{{ messages | nofilter }}")
    return model


@pytest.mark.parametrize(
    ("breakage", "named"),
    [
        ("truncated weights", "model.safetensors"),
        ("garbage header", "model.safetensors"),
        ("no tokenizer.json", "tokenizer.json"),
        ("no config.json", "config.json"),
        ("unreadable tokenizer", "tokenizer.json cannot be read as a tokenizer"),
        ("broken template", "No filter named 'nofilter'"),
    ],
)
def test_a_broken_model_is_named_in_two_lines(tmp_path: Path, breakage: str, named: str) -> None:
    status, output = run_to_its_end(ServerProcess("--model-id", str(broken_copy(tmp_path, breakage))))
    error, hint = [line for line in output.splitlines() if " INFO " not in line]
    assert status == 1 and error.startswith("error: ") and named in error and hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model-id", "/no/such/folder"], "/no/such/folder"),
        (["--max-batch-total-tokens", "2000000000"], "--max-batch-total-tokens"),
        (["--max-total-tokens", "1000000000"], "max_total_tokens"),
        (["--speculate", "2"], "--speculate is not supported yet"),
        (["--quantize", "exl2"], "--quantize exl2 is not supported yet"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_name(arguments: list[str], named: str) -> None:
    status, output = run_to_its_end(ServerProcess(*arguments))
    error, hint = output.splitlines()
    assert status == 1 and error.startswith("error: ") and named in error and hint.startswith("hint: ")


def test_a_quantized_checkpoint_is_refused_before_anything_starts(tmp_path: Path) -> None:
    settings = {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"group_0": {}}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    status, output = run_to_its_end(ServerProcess("--model-id", str(tmp_path)))
    error, _ = output.splitlines()
    assert status == 1 and error.startswith("error: ") and "quantized as compressed-tensors (marlin-24)" in error


def test_only_the_shard_has_torch_in_memory(server: ServerProcess) -> None:
    """Checks which running processes have mapped torch's shared objects."""
    (shard,) = processes.shards(server.pid).values()
    for pid, expected in ((processes.router(server.pid).pid, False), (server.pid, False), (shard.pid, True)):
        assert ("libtorch" in Path(f"/proc/{pid}/maps").read_text()) == expected, pid


@pytest.mark.parametrize("hub", ["refuses", pytest.param("never answers", marks=pytest.mark.slow)])
def test_a_hub_that_gives_no_answer_is_told_in_three_lines(hub: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if hub == "refuses":
            silent.close()
        environ = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        status, output = run_to_its_end(ServerProcess("--model-id", "a/model", environ=environ))
    starting, error, hint = output.splitlines()
    assert status == 1 and "Starting check and download process for a/model" in starting
    assert error.startswith(f"error: {address} cannot be reached for a/model (revision main) (")
    assert hint == "hint: check the connection, then run the same command again"
