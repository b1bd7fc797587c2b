"""The command line: TGI's flags, environment names and defaults, and how fast `--help` is."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from text_generation_common.flags.declaration import flags_of, single_type, values_of
from text_generation_common.flags.kinds import AdmissionMode, Dtype, Topic, TrueFalse
from text_generation_common.flags.programs import LAUNCHER
from text_generation_common.version import own_version
from text_generation_launcher import cli
from text_generation_launcher.cli import command_line
from text_generation_launcher.config import LauncherConfig

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

# Every flag of TGI's launcher and its default in TGI; None where TGI has no default or derives the value.
TGI_FLAGS = TABLES["tgi"]
# Flags of TGI whose default differs here: the demo model, a private folder for sockets, and None for flags without
# effect.
OTHER_FLAGS = {"model-id": "demo", "shard-uds-path": None, "prometheus-port": None, "usage-stats": None, "env": False}
OWN_FLAGS = TABLES["own"]
# Flags without a variable: TGI's --env and its like, and a port whose variable Kubernetes may set.
WITHOUT_VARIABLE = {"env", "print-config", "engine-metrics-port"}
VARIABLES = {"config": "TGI_CONFIG", "standby": "TGI_STANDBY"}  # where the name is not the flag's
ALL_FLAGS = TGI_FLAGS | OTHER_FLAGS | OWN_FLAGS


def invoke(*arguments, **environ):
    """The outcome of a command line, and the config that it gave (None when the command line was refused)."""
    configs = []

    def keep(config):
        configs.append(config)
        return 0

    result = CliRunner().invoke(command_line(keep, environ), list(arguments), env=environ)
    return result, configs[0] if configs else None


def config_of(*arguments, **environ) -> LauncherConfig:
    result, config = invoke(*arguments, **environ)
    assert config is not None, result.output
    return config


def test_help_has_every_flag_with_its_environment_name():
    result, _ = invoke("--help")
    flags = re.findall(r"^  (?:-\w, )?--([a-z-]+)", result.stdout, re.MULTILINE)
    assert sorted(flags) == sorted([*ALL_FLAGS, "help", "version"])
    text = " ".join(result.stdout.split()).replace("- ", "-")
    for name in ALL_FLAGS.keys() - WITHOUT_VARIABLE:
        assert f"env var: {VARIABLES.get(name, name.replace('-', '_').upper())}" in text


def test_help_lists_flags_by_topic_and_other_commands_by_name():
    result, _ = invoke("--help")
    [_, *parts] = re.split(r"^(\S.*):$", result.stdout, flags=re.MULTILINE)
    rows = {heading: re.findall(r"^  (?:-\w, )?([\w-]+)", text, re.MULTILINE) for heading, text in by_two(parts)}
    assert list(rows) == [*Topic, "Options", "Commands"]
    assert rows["Options"] == ["--version", "--help"] and rows["Commands"] == list(cli.COMMANDS)
    assert max(map(len, rows.values())) <= 25
    assert "--model-id" in rows[Topic.MODEL] and "--num-shard" in rows[Topic.COMPUTING]


def by_two(values):
    return zip(values[::2], values[1::2], strict=True)


def test_help_of_a_command_with_few_flags_has_no_topics():
    text = CliRunner().invoke(cli.scale_command_line(), ["--help"]).stdout
    assert re.findall(r"^(\w.*):$", text, re.MULTILINE) == ["Arguments", "Options"]


@pytest.mark.parametrize(("name", "default"), ALL_FLAGS.items())
def test_default_is_tgi_s(name, default):
    value = values_of(config_of())[name.replace("-", "_")]
    assert (value or None) == (default or None)


def test_environment_fills_flags_and_the_command_line_wins():
    assert config_of(MAX_BEST_OF="7", JSON_OUTPUT="true", DTYPE="float32").compute.dtype is Dtype.float32
    assert config_of(MAX_BEST_OF="7").requests.max_best_of == 7
    assert config_of("--max-best-of", "3", MAX_BEST_OF="7").requests.max_best_of == 3
    assert config_of(CORS_ALLOW_ORIGIN="http://a").http.cors_allow_origin == ("http://a",)
    assert config_of(API_KEY="one two").access.api_key == ("one", "two")
    assert config_of("--api-key", "a", "--api-key", "b", API_KEY="one").access.api_key == ("a", "b")
    assert config_of(CLOSED_ROUTES="true").http.closed_routes


def test_every_key_is_refused_if_it_is_empty():
    secrets = [flag for flag in LAUNCHER.flags_of(LauncherConfig) if flag.secret]
    assert {flag.name for flag in secrets} == {"api_key", "admin_api_key"}
    for flag in secrets:
        for arguments, environ in (((flag.flag_name, ""), {}), ((), {flag.variable: ""})):
            result, config = invoke(*arguments, **environ)
            assert config is None and "is empty: give it a value" in result.output.replace("\nhint:", ":")


def test_empty_environment_values_are_not_given():
    config = config_of(REVISION="", MAX_TOTAL_TOKENS="", JSON_OUTPUT="", SHARDED="")
    assert (config.files.revision or None, config.tokens.max_total_tokens, config.process.json_output) == (
        None,
        None,
        False,
    )
    assert not config.access.api_key


def test_forms_of_the_command_line_are_tgi_s():
    config = config_of(
        *["--sharded", "false", "-p", "81", "-g", "5", "-e"],
        *["--cors-allow-origin", "http://a", "--cors-allow-origin", "http://b"],
    )
    assert (config.sharded, config.http.port, config.http.graceful_termination_timeout) == (TrueFalse.false, 81, 5)
    assert config.env
    assert config.http.cors_allow_origin == ("http://a", "http://b")


@pytest.mark.parametrize("arguments", TABLES["wrong_usage"])
def test_wrong_usage_exits_with_2(arguments):
    result, config = invoke(*arguments)
    assert (result.exit_code, config) == (2, None)


NUMBERS = [each.flag_name for each in flags_of(LauncherConfig) if single_type(each.type) in (int, float)]


@pytest.mark.parametrize("name", [name for name in NUMBERS if name.removeprefix("--") in TGI_FLAGS | OTHER_FLAGS])
def test_a_zero_is_a_number_for_every_flag_of_tgi(name):
    """A zero is not wrong usage for TGI's numbers, which are unsigned. Where it is not allowed, the error names the
    flag."""
    assert config_of(name, "0") is not None


@pytest.mark.parametrize("value", ["1", "True", "yes", "maybe"])
def test_switches_in_the_environment_are_exactly_true_or_false(value):
    result, config = invoke(JSON_OUTPUT=value)
    assert (result.exit_code, config) == (2, None)
    assert "JSON_OUTPUT" in result.output


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), ("False", False), ("true", True), ("", True)])
def test_prefix_caching_in_the_environment_is_written_as_for_tgi_s_shards(value, on):
    assert config_of(PREFIX_CACHING=value).scheduling.prefix_caching is on
    assert config_of("--no-prefix-caching", PREFIX_CACHING=value).scheduling.prefix_caching is False
    assert config_of("--prefix-caching", PREFIX_CACHING=value).scheduling.prefix_caching is True


def test_other_values_of_prefix_caching_are_refused():
    result, config = invoke(PREFIX_CACHING="maybe")
    assert (result.exit_code, config) == (2, None) and "PREFIX_CACHING" in result.output


def test_admission_is_named_as_on_the_command_line():
    assert config_of(ADMISSION="reserve").scheduling.admission is AdmissionMode.RESERVE
    assert config_of("--admission", "peak", ADMISSION="reserve").scheduling.admission is AdmissionMode.PEAK


def test_testing_is_a_flag_without_an_environment_variable():
    assert config_of("--testing").process.testing is True
    assert config_of(TESTING="true", FAILPOINTS="shard.step:kill").process.testing is False


def test_version_is_printed_without_a_launch():
    result, config = invoke("-V")
    assert (result.exit_code, config) == (0, None)
    assert result.stdout.startswith("text-generation-launcher ")


def test_the_version_of_code_that_is_not_installed_is_zero(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    assert own_version() == "0.0.0"


def test_the_launcher_loads_nothing_heavy_and_nothing_of_router_or_server():
    script = "import json, sys, text_generation_launcher.cli; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], **quiet(), text=True, check=True)
    roots = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not roots & {
        "torch",
        "numpy",
        "grpc",
        "cryptography",
        "fastapi",
        "transformers",
        "tokenizers",
        "huggingface_hub",
    }
    ours = {root for root in roots if root.startswith("text_generation")}
    assert ours == {"text_generation_common", "text_generation_launcher"}


def quiet() -> dict:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return {"env": environ, "stdout": subprocess.PIPE}
