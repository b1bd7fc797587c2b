"""--print-config: values with their sources, what is refused, in environments as platforms make them; and what is not
shown."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from text_generation_common.flags.declaration import values_of
from text_generation_common.tests.slowness import Seconds, assert_within
from text_generation_launcher import cli
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.print_config import _ORIGINS
from text_generation_launcher.resolve import DEVICE_VARIABLES


@dataclass(frozen=True)
class Environment:
    """An environment and a command line, some lines of the answer, and the causes of what is refused. {model} and
    {file} stand for `places`."""

    name: str
    variables: dict[str, str]
    words: Sequence[str] = ()
    lines: Sequence[str] = ()
    refused: Sequence[str] = ()


ENVIRONMENTS = [Environment(**each) for each in json.loads(Path(__file__).with_suffix(".json").read_text())]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model: Callable[..., None]) -> dict[str, str]:
    """The model and the file of the environments above, in an environment that is empty otherwise."""
    model, file = tmp_path / "model", tmp_path / "tgi.toml"
    model.mkdir()
    make_model(model)
    file.write_text(f'model-id = "{model}"\nmax-best-of = 3\nhostname = "127.0.0.1"\napi-key = ["hush"]\n')
    file.chmod(0o644)
    for name in os.environ:
        monkeypatch.delenv(name)
    return {"model": str(model), "file": str(file)}


def printed(*words: str, **environ: str) -> tuple[int, list[str], list[str]]:
    """The exit status, the lines of values without their columns, and the errors."""

    def fail(config: LauncherConfig) -> int:
        raise AssertionError("a server starts")

    result = CliRunner().invoke(cli.command_line(fail, environ), ["--print-config", *words], env=environ)
    assert result.exit_code in (0, 1), result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    return result.exit_code, lines, [line for line in result.stderr.splitlines() if not line.startswith("hint: ")]


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda each: each.name)
def test_values_sources_and_refusals_in(environment: Environment, places: dict[str, str]) -> None:
    variables = {name: value.format(**places) for name, value in environment.variables.items()}
    words = [word.format(**places) for word in environment.words]
    status, lines, errors = printed(*words, **variables)
    assert not [line for line in environment.lines if line.format(**places) not in lines], "\n".join(lines)
    assert len(errors) == len(environment.refused), errors
    for error, cause in zip(errors, environment.refused, strict=True):
        assert cause.format(**places) in error
    assert status == (1 if errors else 0)
    assert "hush" not in "\n".join(lines + errors)


def test_every_visible_flag_has_a_line(places: dict[str, str]) -> None:
    _, lines, _ = printed("--model-id", places["model"])
    shown = [line.removeprefix("# ").split()[0] for line in lines[1:]]
    flags = cli.LAUNCHER.flags_of(LauncherConfig)
    hidden = {"config", "print_config"}
    assert shown == [each.flag_name[2:] for each in flags if not each.hidden and each.name not in hidden]


def test_no_variable_of_a_flag_has_another_name_that_kubernetes_gives_for_a_service() -> None:
    variables = {flag.variable or "" for flag in cli.LAUNCHER.flags_of(LauncherConfig)}
    links = {each for each in variables if re.search(r"_SERVICE_(HOST|PORT)|_PORT_", f"_{each}")}
    assert not links and {each for each in variables if each.endswith("PORT")} >= {"PORT", "PROMETHEUS_PORT"}


def test_origins_are_flags_and_variables() -> None:
    names = values_of(LauncherConfig()).keys()
    assert names >= _ORIGINS.keys() and {*names, *DEVICE_VARIABLES} >= {each for of in _ORIGINS.values() for each in of}


def test_what_is_printed_is_a_file_with_the_same_values(places: dict[str, str], tmp_path: Path) -> None:
    given = {"MODEL_ID": places["model"], "MAX_BEST_OF": "7", "SHARDED": "false", "DTYPE": "float32", "PORT": "81"}
    given |= {"CORS_ALLOW_ORIGIN": 'http://"a" http://b', "JSON_OUTPUT": "true", "WAITING_SERVED_RATIO": "1e-7"}
    given |= {"SERVED_MODEL_NAME": "größe\x7f\n\\", "PREFIX_CACHING": "0", "ADMISSION": "peak", "ROPE_FACTOR": "2"}
    file = tmp_path / "printed.toml"
    status, lines, errors = printed(**given)
    assert (status, errors) == (0, [])
    file.write_text("\n".join(lines))
    assert len(tomllib.loads(file.read_text())) == len(given)
    assert config_of(TGI_CONFIG=str(file)) == config_of(**given) | {"config": str(file)}
    assert config_of() != config_of(**given)


def config_of(**environ: str) -> dict[str, object]:
    configs: list[LauncherConfig] = []
    app = cli.command_line(lambda config: configs.append(config) or 0, environ)  # type: ignore[func-returns-value]
    assert CliRunner().invoke(app, [], env=environ).exit_code == 0
    return values_of(configs[0])


def test_a_wrong_command_line_and_a_wrong_file_are_told_too(places: dict[str, str]) -> None:
    Path(places["file"]).write_text(f'model-id = "{places["model"]}"\nport = "x"\nnone-such = 1\nmax-best-of = 3')
    status, lines, errors = printed("--config", places["file"])
    assert status == 1 and "max-best-of = 3 # file " + places["file"] in lines
    assert [error.partition(": ")[2].rpartition(": ")[2] for error in errors] == [
        "port must be a whole number", "none-such is not a flag"
    ]  # fmt: skip
    for words in (("--port", "x"), ("--prt", "1"), ("stray",)):
        result = CliRunner().invoke(cli.command_line(lambda config: 0, {}), ["--print-config", *words])
        assert (result.exit_code, result.stdout) == (2, "") and result.stderr.startswith("error: ")


def test_a_refused_value_has_the_source_that_it_comes_from(places: dict[str, str]) -> None:
    Path(places["file"]).write_text('hostname = "no.such.host.invalid"\nmax-best-of = 3\n')
    _, lines, errors = printed(TGI_CONFIG=places["file"], MAX_BEST_OF="x", HOSTNAME="pod-7")
    assert f'# hostname = "no.such.host.invalid" # file {places["file"]}: refused' in lines
    assert '# max-best-of = "x" # variable MAX_BEST_OF: refused' in lines and len(errors) == 2


def test_a_wrong_file_hides_neither_help_nor_version(places: dict[str, str]) -> None:
    for word in ("--help", "--version"):
        result = CliRunner().invoke(cli.command_line(lambda config: 0, {}), [word], env={"TGI_CONFIG": "/none"})
        assert (result.exit_code, result.stderr) == (0, "")


WATCHED = """
import sys
def refuse(event, _):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "socket.connect", "socket.bind"):
        raise SystemExit(f"{event} was called")
sys.addaudithook(refuse)
from text_generation_launcher.cli import main
try: main(sys.argv[1:])
except SystemExit as end: status = end.code
loaded = {name.partition(".")[0] for name in sys.modules}
print("#", status, *sorted(loaded & {"torch", "huggingface_hub", "asyncio", "grpc"}))
"""


def watched(*words: str) -> list[str]:
    """The last words of a run in which the command may start and ask nothing: its status, and large packages that it
    has loaded."""
    command = [sys.executable, "-c", WATCHED, "--print-config", *words]
    environ = {"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HOME": "/none"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize("model_id", ["demo", "org/m"])
def test_nothing_starts_nothing_is_asked_and_no_large_package_is_loaded(model_id: str) -> None:
    assert watched("--model-id", model_id) == ["0"]


def test_half_a_second_of_processor_time_is_enough() -> None:
    assert_within(lambda: Seconds.of(watched), cpu=0.5)
