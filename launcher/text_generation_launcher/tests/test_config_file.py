"""The file of --config: what it may hold, what is refused, and what overrides it."""

import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from text_generation_common.flags.declaration import values_of
from text_generation_common.flags.kinds import Dtype, TrueFalse
from text_generation_launcher import cli, config_file
from text_generation_launcher.config import LauncherConfig


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tgi.toml"


def answer(*words: object, **environ: str) -> tuple[str, LauncherConfig | None]:
    configs: list[LauncherConfig] = []
    app = cli.command_line(lambda config: configs.append(config) or 0, environ)  # type: ignore[func-returns-value]
    result = CliRunner().invoke(app, [str(word) for word in words], env={"HOSTNAME": None, **environ})
    return result.output, configs[0] if configs else None


def config_of(*words: object, **environ: str) -> LauncherConfig:
    output, config = answer(*words, **environ)
    assert config is not None, output
    return config


def test_names_are_those_of_flags_with_dashes_or_underscores(file: Path) -> None:
    file.write_text(
        'model-id = "org/m"\nmax_best_of = 7\nwaiting-served-ratio = 1\ndtype = "float32"\nsharded = false\n'
        'cors-allow-origin = ["http://a", "http://b"]\njson-output = true\nprefix-caching = false\n'
        'cuda-memory-fraction = 0.5\napi-key = ["a"]\n'
    )
    config = config_of("--config", file)
    assert (config.model.model_id, config.requests.max_best_of, config.compute.dtype) == ("org/m", 7, Dtype.float32)
    assert (config.sharded, config.scheduling.waiting_served_ratio) == (TrueFalse.false, 1.0)
    assert config.http.cors_allow_origin == ("http://a", "http://b") and config.process.json_output
    assert not config.scheduling.prefix_caching and config.shard.cuda_memory_fraction == 0.5
    assert config.access.api_key == ("a",)


def test_flags_override_the_environment_and_the_environment_overrides_the_file(file: Path) -> None:
    file.write_text("max-best-of = 7\njson-output = true\nprefix-caching = false\napi-key = ['f']\n")
    assert config_of(TGI_CONFIG=str(file)).requests.max_best_of == 7
    assert config_of(TGI_CONFIG=str(file), MAX_BEST_OF="").requests.max_best_of == 7
    assert config_of(TGI_CONFIG=str(file), MAX_BEST_OF="5").requests.max_best_of == 5
    assert config_of("--max-best-of", 3, TGI_CONFIG=str(file), MAX_BEST_OF="5").requests.max_best_of == 3
    assert not config_of(TGI_CONFIG=str(file), JSON_OUTPUT="false").process.json_output
    assert config_of("--prefix-caching", "--config", file).scheduling.prefix_caching
    assert config_of("--config", file, API_KEY="e").access.api_key == ("e",)
    assert config_of("--config", file, CONFIG="/no/such/file", TGI_CONFIG="/none").requests.max_best_of == 7


def test_a_hostname_of_the_file_is_resolved_and_loses_to_an_address_only(file: Path) -> None:
    """Containers set HOSTNAME to their name: with it, a server that was to be closed would be open to all."""
    file.write_text('hostname = "localhost"')
    assert config_of("--config", file, HOSTNAME="pod-7").http.hostname == "127.0.0.1"
    assert config_of("--config", file, HOSTNAME="127.0.0.2").http.hostname == "127.0.0.2"
    assert config_of(HOSTNAME="pod-7").http.hostname == "pod-7"
    file.write_text('hostname = "no.such.host.invalid"')
    assert "neither an IP address nor a name" in answer("--config", file, HOSTNAME="pod-7")[0]


@pytest.mark.parametrize(
    ("text", "cause", "hint"),
    [
        ("max-bestof = 3", "max-bestof is not a flag", "did you mean max-best-of?"),
        ("qwertyuiop = 3", "qwertyuiop is not a flag", "leave it out"),
        ("tensor_parallel_size = 2", "tensor_parallel_size is not a flag", "use --num-shard"),
        ("testing = true", "testing is not a flag", "leave it out"),
        ('config = "other.toml"', "config is for the command line", "leave it out"),
        ("[model]\nmodel-id = 'm'", "model is a section, and values stand in none", "leave its title out"),
        ("max-best-of = 1\nmax_best_of = 2", "max_best_of stands twice", "leave one out"),
        ('port = "80"', "port must be a whole number", ""),
        ("port = 80.0", "port must be a whole number", ""),
        ("max-best-of = true", "max-best-of must be a whole number", ""),
        ("rope-factor = '2'", "rope-factor must be a number", ""),
        ("json-output = 1", "json-output must be true or false", ""),
        ("model-id = ['m']", "model-id must be a string", ""),
        ("revision = {a = 1}", "revision must be a string", ""),
        ("trusted-proxy = '::1'", "trusted-proxy must be a list of strings", 'write it as ["…", "…"]'),
        ("dtype = 'int4'", "dtype must be one of these strings", "use float32, bfloat16, float16"),
        ("sharded = 1", "sharded must be one of these strings", "use true, false"),
        ("port = 70000", "port is 70000, and it must be at most 65535", ""),
        ("max-n = 0", "max-n is 0, and it must be at least 1", ""),
        ("model-id = ' '", "model-id is empty", "give it a value, or leave it out"),
        ("api-key = ['a', '']", "api-key is empty", "give it a value, or leave it out"),
        ("port = ", "is not valid TOML", "repair it"),
        ("a = '\xff'".encode("latin-1"), "is not valid TOML", "repair it"),
        (b"a = " + 2000 * b"[", "is not valid TOML", "repair it"),
    ],
)
def test_what_no_flag_takes_is_refused_with_file_and_key(file: Path, text: str | bytes, cause: str, hint: str) -> None:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    output, config = answer("--config", file)
    error, advice = output.splitlines()
    assert config is None and error.startswith(f"error: --config {file}") and cause in error
    assert advice.startswith(f"hint: {hint}") and advice.endswith("--help` lists all flags")


@pytest.mark.parametrize("text", ["api-key = 'hush'", "admin-api-key = 5.1234", "ngrok-authtoken = ['hush']"])
def test_an_error_shows_no_secret(file: Path, text: str) -> None:
    file.write_text(text)
    output, config = answer("--config", file)
    assert config is None and "must be" in output and "hush" not in output and "1234" not in output


@pytest.mark.parametrize(("name", "reason"), [("none.toml", "No such file"), ("", "Is a directory")])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, name: str, reason: str) -> None:
    output, config = answer("--config", tmp_path / name)
    assert config is None and f"--config {tmp_path / name} cannot be read ({reason}" in output


@pytest.mark.parametrize("key", ["api-key = ['k']", "admin_api_key = 'k'", "ngrok-authtoken = 'k'"])
def test_a_secret_that_every_user_can_read_gets_a_warning(file: Path, key: str) -> None:
    file.write_text(key)
    for mode, is_exposed in ((0o644, True), (0o604, True), (0o640, False), (0o600, False)):
        file.chmod(mode)
        warning = config_file.exposure(str(file))
        assert (f"can read {file}, with {key.partition(' ')[0].replace('_', '-')}: chmod" in warning) is is_exposed
        assert (warning == "") is not is_exposed
    file.write_text("max-best-of = 3")
    file.chmod(0o644)
    assert config_file.exposure(str(file)) == ""


def test_a_start_warns_of_such_a_file(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    file.write_text("api-key = ['k']\nnum-shard = 0")
    file.chmod(0o644)
    config = config_of("--config", file)
    assert cli.run(config, {}, []) == 2
    assert f"Every user of this machine can read {file}" in capsys.readouterr().out


def test_every_flag_can_stand_in_the_file() -> None:
    names = values_of(LauncherConfig()).keys() - config_file.flags_of_file().keys()
    assert names == {"config", "print_config", "testing", "engine_metrics_tries"}
