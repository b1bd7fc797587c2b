"""Starts that cannot succeed: each is told in three lines at most, the cause first, and starts no child."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from text_generation_common.flags.programs import LAUNCHER
from text_generation_common.tests.slowness import Seconds, assert_within
from text_generation_launcher import cli
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.mistakes import FOREIGN
from text_generation_launcher.tests.bad_starts import BAD, flags_of


@pytest.mark.parametrize("name", BAD)
def test_a_bad_start_is_told_in_three_lines_the_cause_first(
    name: str,
    folder: Path,
    is_listed: Callable[[str], bool],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = BAD[name]
    status, lines = refused(flags_of(bad, folder), bad.environ, capsys, monkeypatch)
    assert status == bad.status, lines
    told = [line for line in lines if " INFO " not in line]
    assert told[0].startswith("error: ") and bad.error in told[0], told
    assert not bad.hint or (told[1].startswith("hint: ") and bad.hint in told[1]), told
    assert len(lines) <= 3 and not any(word in told[0] for word in ("Traceback", "Argument", "Validation", "Error"))
    assert is_listed(told[0].removeprefix("error: ")), f"docs/troubleshooting.md has no line for: {told[0]}"


def test_every_foreign_flag_is_none_of_ours_and_ours_exist() -> None:
    ours = {name for flag in LAUNCHER.flags_of(LauncherConfig) for name in (flag.flag_name, flag.off_name, flag.short)}
    assert not FOREIGN.keys() & ours and len(FOREIGN) >= 25
    named = {word for hint in FOREIGN.values() for word in hint.replace(":", "").split() if word.startswith("--")}
    assert named - ours == set() and "--num-shard" in named


# Some of each kind, to be started as real processes.
REAL = [
    "name of no machine", "empty model in the environment", "foreign -ngl", "foreign --tensor-parallel-size",
    "speculation", "Ollama's name", "address on the hub", "adapter", "cache folder",
    "pointer in the place of model.safetensors", "heads by three", "truncated weights",
]  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_a_bad_start_costs_a_second_of_processor_time_at_most(name: str, folder: Path) -> None:
    bad = BAD[name]
    flags = flags_of(bad, folder)
    environ = {
        "PATH": "/nonexistent",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "",
    }

    def start() -> None:
        command = [sys.executable, "-m", "text_generation_launcher.cli", *flags]
        done = subprocess.run(command, env=environ | bad.environ, capture_output=True, text=True, timeout=60)
        lines = (done.stdout + done.stderr).splitlines()
        assert done.returncode == bad.status and len(lines) <= 3, lines
        assert any(line.startswith("error: ") and bad.error in line for line in lines), lines

    assert_within(lambda: Seconds.of(start), cpu=1.0)


def refused(
    flags: list[str], environ: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[str]]:
    """Exit status and lines of the launcher with these flags, in this process. It finds no programs for children, and
    sees no GPU."""
    for variable in list(os.environ):
        monkeypatch.delenv(variable)
    monkeypatch.setattr("sys.argv", ["text-generation-launcher", *flags])
    for variable, value in ({"PATH": "/nonexistent", "CUDA_VISIBLE_DEVICES": ""} | environ).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as ended:
        cli.main(flags, [])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), (out + err).splitlines()


def test_a_good_model_passes_and_only_its_programs_are_missed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags in ([], ["--num-shard", "2"], ["--quantize", "int8"], ["--max-total-tokens", "2048"]):
        status, lines = refused(["--model-id", str(folder), *flags], {}, capsys, monkeypatch)
        assert (status, lines[0]) == (1, "error: text-generation-server not found in PATH"), lines


def test_an_empty_token_of_the_hub_is_none(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HF_TOKEN", "REVISION", "TRUSTED_PROXY", "SERVED_MODEL_NAME"):
        _, lines = refused(["--model-id", str(folder)], {variable: ""}, capsys, monkeypatch)
        assert lines[0] == "error: text-generation-server not found in PATH", lines


def test_an_adapter_beside_the_weights_that_it_was_merged_into_is_ignored_with_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"no header")
    _, lines = refused(["--model-id", str(folder)], {}, capsys, monkeypatch)
    [warning] = [line for line in lines if "adapter_model.safetensors of " in line]
    assert " WARNING " in warning and "is ignored: adapters are named by --lora-adapters" in warning
    assert "error: text-generation-server not found in PATH" in lines


def test_a_used_port_is_told_in_two_lines(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("text-generation-server", "text-generation-router"):
        (programs / name).write_text("#!/bin/false\n")
        (programs / name).chmod(0o755)
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        flags = ["--model-id", str(folder), "--hostname", "127.0.0.1", "--port", str(port)]
        flags += ["--shard-uds-path", str(tmp_path / "s")]
        status, lines = refused(flags, {"PATH": str(programs)}, capsys, monkeypatch)
    assert (status, lines) == (1, [f"error: port {port} is in use on 127.0.0.1", "hint: choose another --port"])


def test_json_output_tells_the_error_in_json_with_its_class(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*flags: str) -> dict[str, str]:
        _, lines = refused(["--json-output", *flags], {}, capsys, monkeypatch)
        return json.loads(lines[-1])

    heads = told("--model-id", str(folder), "--num-shard", "3")
    assert (heads["level"], heads["kind"], heads["hint"]) == ("ERROR", "ArgumentValidation", "choose one of 1, 2, 4")
    assert heads["message"].startswith("--num-shard 3 cannot divide") and heads["target"] == "text_generation_launcher"
    assert told("--port", "x")["kind"] == "UsageError"
