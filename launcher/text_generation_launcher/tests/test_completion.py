"""Completion in shells: commands, flags, values, local models; by the protocol of the scripts, and by bash itself."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from text_generation_common.tests.slowness import Seconds, assert_within
from text_generation_launcher import cli
from text_generation_launcher.completion import SCRIPTS, VARIABLE, completed


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two models, a folder and a file; and a cache with a model that is there, and others
    that are not."""
    for folder in ("llama", "my model", "deep/qwen", ".hidden"):
        (tmp_path / "work" / folder).mkdir(parents=True)
    for folder in ("llama", "my model", "deep/qwen"):
        (tmp_path / "work" / folder / "config.json").write_text("{}")
    (tmp_path / "work" / "log").write_text("")
    hub = tmp_path / ".cache" / "huggingface" / "hub"
    snapshots = ("models--org--m/snapshots/1", "models--org--weights-only/snapshots/1", "datasets--org--d/snapshots/1")
    for snapshot in snapshots:
        (hub / snapshot).mkdir(parents=True)
    for snapshot in (snapshots[0], snapshots[2]):
        (hub / snapshot / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def found(*words: str, shell: str = "fish", **environ: str) -> list[str]:
    lines = completed(shell, words, {"HOME": "/none"} | environ, cli.OTHERS, cli.flags_of_command)
    return [line.partition("\t")[0] for line in lines]


def test_flags_are_those_that_help_shows_and_that_are_not_given_yet() -> None:
    assert found("--dty") == ["--dtype"] and found("--no-") == ["--no-prefix-caching", "--no-page"]
    assert found("--max-b") == [
        "--max-best-of",
        "--max-batch-prefill-tokens",
        "--max-batch-total-tokens",
        "--max-batch-size",
    ]
    assert found("--max-best-of", "2", "--max-be") == found("--testi") == found("--engine-metrics-tr") == []
    assert found("--cors-allow-origin", "a", "--cors") == ["--cors-allow-origin"]  # may be repeated
    assert found("-p", "80", "--por") == []
    help_text = CliRunner().invoke(cli.command_line(lambda _: 0, {}), ["--help"]).output
    shown = set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", help_text, re.MULTILINE))
    assert {*found("--")} == shown - {"--version"} | {"--no-prefix-caching", "--no-page"}


def test_values_are_those_that_are_supported() -> None:
    assert found("--dtype", "") == ["float32", "bfloat16", "float16"] and found("--dtype", "b") == ["bfloat16"]
    assert (
        found("--quantize", "g") == ["gptq"]
        and found("--quantize", "ex") == []
        and found("--sharded", "") == ["true", "false"]
    )
    assert found("--dtype=b") == ["--dtype=bfloat16"] and found("--port", "") == found("--tls-dir", "/e") == []
    for words in (("--dtype", "="), ("--dtype", "=", "")):  # bash makes `=` a word
        assert found(*words, shell="bash") == ["float32", "bfloat16", "float16"]
    assert "--port" in found("--json-output", "")  # a switch has no value


def test_commands_stand_first_and_have_flags_of_their_own() -> None:
    assert found("sc") == ["scale"] and found("--json-output", "sc") == []
    assert found("scale", "--") == ["--port", "--shard-uds-path", "--help"]
    assert {"--days", "--renew"} <= {*found("certs", "--")} and found("certs", "") == []
    assert found("completion", "") == ["bash", "zsh", "fish"] and found("completion", "z") == ["zsh"]
    assert {*cli.COMMANDS} < {*found("")} and found() == found("") and cli.COMMANDS.keys() == cli.OTHERS.keys()
    [line] = completed("fish", ["rep"], {}, cli.OTHERS, cli.flags_of_command)
    assert line == "replicas\tPrint the state of each replica of the server on --port"


def test_models_are_the_demo_those_of_the_cache_and_folders(models: Path) -> None:
    assert found("--model-id", "", HOME=str(models)) == ["demo", "org/m", "llama", "my model"]
    home = models / ".cache" / "huggingface"
    for variable, folder in (
        ("HF_HUB_CACHE", home / "hub"),
        ("HUGGINGFACE_HUB_CACHE", home / "hub"),
        ("HF_HOME", home),
        ("XDG_CACHE_HOME", models / ".cache"),
    ):
        assert found("--model-id", "o", **{variable: str(folder)}) == ["org/m"]
    assert found("--huggingface-hub-cache", str(home / "hub"), "--model-id=org") == ["--model-id=org/m"]
    assert found("--model-id", "o") == []


def test_a_path_leads_through_folders_without_a_model(models: Path) -> None:
    assert found("--model-id", "./") == ["./deep/", "./llama", "./my model"]
    assert found("--model-id", "./deep/") == ["./deep/qwen"] and found("--model-id", "./.") == ["./.hidden/"]
    work = str(models / "work")
    assert found("--model-id", work + "/l") == [work + "/llama"]
    assert found("--model-id", "/no/such/") == found("--model-id", "~no-such-user/") == []


def test_each_shell_gets_words_in_its_own_form(models: Path) -> None:
    for word in ("my", "my\\ m"):
        assert found("--model-id", word, shell="bash") == ["my\\ model"]
    assert found("--model-id", '"my m', shell="bash") == ["my model"]  # the quote stays open
    (models / "work" / "a:b").mkdir()
    (models / "work" / "a:b" / "config.json").write_text("{}")
    assert found("--model-id", "a", shell="zsh") == ["a\\:b"]
    for shell, between in (("zsh", ":"), ("fish", "\t")):
        [line] = completed(shell, ["--dty"], {}, cli.OTHERS, cli.flags_of_command)
        assert line.startswith(f"--dtype{between}Type to compute in")


def test_the_scripts_are_printed_and_start_the_program() -> None:
    for shell, script in SCRIPTS.items():
        assert CliRunner().invoke(cli.completion_command_line(), [shell]).output == script + "\n"
        assert f"{VARIABLE}={shell} " in script


def answer(*words: str) -> list[str]:
    """The lines that a shell gets of the program."""
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), VARIABLE: "bash", "HOME": "/none"}
    command = [sys.executable, "-m", "text_generation_launcher.cli", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_program_answers_a_shell() -> None:
    assert answer("--model-id", "de") == ["demo"]


def test_an_answer_takes_three_tenths_of_a_second_of_processor_time() -> None:
    assert_within(lambda: Seconds.of(lambda: answer("--dty")), cpu=0.3)


BASH = """
source <(printf '%s' "$SCRIPT")
complete -p text-generation-launcher
for last in '--dty' 'my'; do
    COMP_WORDS=("$PROGRAM" --model-id "$last") COMP_CWORD=2
    if [[ $last == --* ]]; then COMP_WORDS=("$PROGRAM" "$last") COMP_CWORD=1; fi
    _text_generation_launcher "$PROGRAM" "$last"
    printf '<%s>\\n' "${COMPREPLY[@]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_with_the_script(models: Path) -> None:
    program = models / "text-generation-launcher"
    program.write_text(f"#!{sys.executable}\nfrom text_generation_launcher.cli import main\nmain()\n")
    program.chmod(0o755)
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": "/none", "PATH": os.environ["PATH"]}
    environ |= {"SCRIPT": SCRIPTS["bash"], "PROGRAM": str(program)}  # type: ignore[index]
    done = subprocess.run(["bash", "--norc", "-c", BASH], env=environ, capture_output=True, text=True, check=True)
    registered, *lines = done.stdout.splitlines()
    assert registered == "complete -o bashdefault -o default -F _text_generation_launcher text-generation-launcher"
    assert lines == ["<--dtype>", "<my\\ model>"] and done.stderr == ""
