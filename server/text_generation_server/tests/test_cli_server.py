"""The shard's command line: the values it accepts and refuses, and the modules it must not import."""

import errno
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file

import text_generation_server
from text_generation_common.flags.kinds import CpuTarget, Dtype, KvCacheDtype, Quantize, RopeScalingKind
from text_generation_common.flags.model import ComputeFlags, ShardFlags
from text_generation_server import cli
from text_generation_server.config import ShardConfig
from text_generation_server.errors import OptionError

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

VARIABLES = (
    "FAILPOINTS", "RANK", "WORLD_SIZE", "MAX_TOTAL_TOKENS", "ROPE_SCALING", "ROPE_FACTOR", "TGI_EPOCH",
    "CUDA_GRAPHS", "CUDA_MEMORY_FRACTION",
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    return tmp_path


def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES} | variables
    command = [sys.executable, "-m", "text_generation_server.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


REFUSED_TO_SERVE = TABLES["refused"]
REFUSED_TO_DOWNLOAD = [
    (["--merge-lora"], {}, "--merge-lora is not supported yet"),
    (["--trust-remote-code"], {}, "--trust-remote-code is not supported yet"),
    (["--extension", ".bin"], {}, "--extension .bin is not supported"),
    (["--load-format", "npcache"], {}, "--load-format npcache is not supported: use auto, dummy"),
]
REFUSED = [("serve", *case) for case in REFUSED_TO_SERVE] + [
    ("download-weights", *case) for case in REFUSED_TO_DOWNLOAD
]


@pytest.mark.parametrize(("command", "options", "variables", "text"), REFUSED)
def test_what_does_not_exist_is_refused_by_name(model, monkeypatch, command, options, variables, text):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError) as refused:
        invoke(command, str(model), *options)
    assert text in str(refused.value) and "\n" not in str(refused.value)


def invoke(*arguments: str) -> None:
    typer.main.get_command(cli.app).main(list(arguments), standalone_mode=False)


def test_options_and_environment_become_one_config(model, monkeypatch, one_config):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(model))
    default = one_config("serve", str(model))
    assert default == ShardConfig(
        model_path=model, uds_path=f"{model}/tgi-py/3000/shard", rank=0, world_size=1, epoch=1
    )
    assert (default.compute, default.graph_sizes, default.watermark) == (ComputeFlags(), None, (0.5, 2.0))
    given = {"RANK": "0", "WORLD_SIZE": "1", "TGI_EPOCH": "7", "MAX_TOTAL_TOKENS": "100", "ROPE_SCALING": "linear"}
    given |= {"ROPE_FACTOR": "2.5", "WATERMARK_GAMMA": "0.25", "WATERMARK_DELTA": "3", "CUDA_GRAPHS": "0,8,2,8"}
    for name, value in (given | {"CUDA_MEMORY_FRACTION": "0.5", "CPU_TARGET": "avx512"}).items():
        monkeypatch.setenv(name, value)
    options = ["--sharded", "--speculate", "0", "--dtype", "bfloat16", "--uds-path", "/x/y", "--max-input-tokens", "99"]
    options += ["--quantize", "int8", "--kv-cache-dtype", "fp8_e4m3fn"]
    config = one_config("serve", str(model), *options)
    assert config == ShardConfig(
        model_path=model,
        uds_path="/x/y",
        rank=0,
        world_size=1,
        epoch=7,
        max_total_tokens=100,
        compute=ComputeFlags(dtype=Dtype.bfloat16, quantize=Quantize.int8, kv_cache_dtype=KvCacheDtype.fp8_e4m3fn),
        shard=ShardFlags(
            rope_scaling=RopeScalingKind.linear,
            rope_factor=2.5,
            watermark_gamma=0.25,
            watermark_delta=3.0,
            cuda_graphs="0,8,2,8",
            cuda_memory_fraction=0.5,
            cpu_target=CpuTarget.avx512,
        ),
    )
    assert (config.graph_sizes, config.watermark) == ((2, 8), (0.25, 3.0))


def test_faults_without_the_testing_flag_are_mentioned_and_not_read(model, monkeypatch, one_config, caplog):
    monkeypatch.setenv("FAILPOINTS", "shard.step")
    with caplog.at_level("WARNING"):
        monkeypatch.setattr(cli, "setup_logging", lambda *_: None)  # otherwise caplog would lose its handler
        assert one_config("serve", str(model))
    assert [record.getMessage() for record in caplog.records] == [cli.faults.NOT_TESTING]


def test_a_shard_by_hand_listens_in_the_private_folder_of_a_port(model, monkeypatch, one_config):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(model))
    assert one_config("serve", str(model), "--port", "8080").uds_path == f"{model}/tgi-py/8080/shard"
    assert (model / "tgi-py" / "8080").stat().st_mode & 0o777 == 0o700
    (model / "tgi-py" / "8080").chmod(0o755)
    with pytest.raises(OptionError, match=r"8080 is open to other users \(mode 755\)"):
        one_config("serve", str(model), "--port", "8080")


def serve_by(serve, monkeypatch):
    """The server's module, which takes seconds to import, has `serve` in place of its own."""
    fake = types.ModuleType("text_generation_server.server")
    fake.serve = serve
    monkeypatch.setitem(sys.modules, "text_generation_server.server", fake)
    monkeypatch.setattr(text_generation_server, "server", fake, raising=False)


@pytest.fixture
def one_config(monkeypatch):
    """Runs a command with a fake server, which only records its config."""
    told: list[ShardConfig] = []
    serve_by(told.append, monkeypatch)

    def run_with_fake(*arguments: str) -> ShardConfig:
        invoke(*arguments)
        return told.pop()

    return run_with_fake


def test_help_and_refusals_import_neither_torch_nor_the_hub(model):
    code = (
        "import sys\nfrom text_generation_server import cli\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'grpc'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    for arguments in (["--help"], ["serve", "--help"], ["quantize", "m", "out"], ["serve", "m", "--quantize", "exl2"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["quantize", "m", "out", "--groupsize", "128"], "quantize is not supported yet"),
        (["serve", "/no/such/model"], "/no/such/model is neither a directory nor a GGUF file"),
        (["download-weights", "/no/such/model"], "/no/such/model is neither a directory nor a GGUF file"),
        (["download-weights", "../x y"], "is neither a directory nor a GGUF file"),
        (["serve", "x y"], "is neither a directory nor a model id"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_an_exit_code(arguments, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["text-generation-server", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, error = capsys.readouterr()
    assert ended.value.code == (78 if arguments[0] == "serve" else 1)
    assert error.count("\n") == 1 and error.startswith("Error: ") and text in error
    assert out == ""


def test_a_broken_model_is_refused_by_the_command_before_the_server_starts(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    done = run("serve", str(model))
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1 and f"Error: {file} is broken" in done.stderr


REFUSALS = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    ImportError("libtorch.so: cannot map segment: Cannot allocate memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nTrace"),
    RuntimeError("can't start new thread"),
    RuntimeError("std::bad_alloc"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
]


def serve_with(error, monkeypatch):
    def refuse(config):
        raise error

    serve_by(refuse, monkeypatch)


def test_another_error_of_a_shard_is_not_taken_for_a_lack_of_memory(model, monkeypatch):
    serve_with(RuntimeError("a kernel failed"), monkeypatch)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        invoke("serve", str(model), "--uds-path", "x")


@pytest.mark.parametrize("error", REFUSALS, ids=str)
@pytest.mark.parametrize("limit", [None, 3 << 30])
def test_memory_that_is_refused_while_a_shard_loads_is_final_and_says_what_would_fit(
    model, monkeypatch, capsys, error, limit
):
    """Also without weights, of which random numbers take the place."""
    if limit:
        (model / "model.safetensors").unlink()
    serve_with(error, monkeypatch)
    monkeypatch.setattr("text_generation_common.memory.address_limit", lambda: limit)
    form = "dummy" if limit else "auto"
    command = ["text-generation-server", "serve", str(model), "--uds-path", "x", "--load-format", form]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == os.EX_CONFIG
    assert line.startswith("Error: the system refused memory while 0 MiB of weights were loaded (")
    assert ("raise this limit to 3136 MiB at least" if limit else "MiB are free: choose a smaller model") in line


def test_wrong_usage_is_exit_code_2(model):
    assert run("serve", str(model), "--no-such-option").returncode == 2
    with pytest.raises(SystemExit) as ended:
        cli.app(["serve"])
    assert ended.value.code == 2
