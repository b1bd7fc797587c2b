import hashlib
import json
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from starlette.applications import Starlette
from typer.testing import CliRunner

from text_generation_common.flags.declaration import from_values, with_flags
from text_generation_common.flags.kinds import AdmissionMode
from text_generation_router.cli import app
from text_generation_router.config import RouterConfig, RouterFlags
from text_generation_router.errors import StartError
from text_generation_router.http.limits import SEND_BUFFER_BYTES, ConnectionLimits, LimitHits
from text_generation_router.http.server import uvicorn_config
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.resolve import adapters_of, check, resolve
from text_generation_router.serve import allow_descriptors, bind, mention_addresses
from text_generation_router.serve import run as run_router

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())


def run(*words: str, **env: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["--tokenizer-name", "/nonexistent", *words], env={"HOSTNAME": "127.0.0.1"} | env)
    return result.exit_code, result.output


FLAGS = RouterFlags(tokenizer_name="m", master_shard_uds_path="/tmp/s-0")
PLAIN = with_flags(resolve(FLAGS), hostname="127.0.0.1", port=0, payload_limit=1, compute_type="cpu")


def config(**changes) -> RouterConfig:
    return with_flags(PLAIN, **changes)


def config_of(values: dict[str, object]) -> RouterConfig:
    return resolve(from_values(RouterFlags, values))


def test_a_wrong_endpoint_for_traces_is_refused_in_one_line():
    status, output = run("--otlp-endpoint", "localhost:4317")
    assert status == 1 and "Error: --otlp-endpoint localhost:4317 is not an address: write it as http://" in output


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--ngrok"], "--ngrok"),
        (["--trust-remote-code"], "--trust-remote-code"),
        (["--max-image-fetch-size", "1"], "--max-image-fetch-size"),
    ],
)
def test_flags_without_their_feature_are_refused_by_name(words, flag):
    status, output = run(*words)
    assert status == 1 and f"Error: {flag} is not supported yet: start without it\n" in output


def test_flags_without_effect_are_logged():
    _, output = run("--prometheus-port", "1", "--usage-stats", "off", "--validation-workers", "0")
    assert "--prometheus-port has no effect" in output and "--usage-stats has no effect" in output


def test_environment_names_are_tgis():
    status, output = run(VALIDATION_WORKERS="0")
    assert status == 1 and "Error: `validation_workers` must be > 0\n" in output


def test_faults_are_injected_where_testing_was_asked_for():
    status, output = run("--testing", FAILPOINTS="router.rpc:explode")
    assert status == 1 and "Error: FAILPOINTS: 'router.rpc:explode' is not a rule" in output
    _, output = run(FAILPOINTS="router.rpc:explode")
    assert "is not a rule" not in output and output.count("FAILPOINTS is set and has no effect") == 1


def test_keys_come_from_flags_the_environment_and_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(hashlib.sha256(b"c").hexdigest())
    seen = []
    for words, env in (
        (["--api-key", "a", "--api-key", "b", "--api-key-file", str(file)], {}),
        ([], {"API_KEY": "a b", "API_KEY_FILE": str(file)}),
    ):
        given = app_values(*words, **env)
        seen.append(config_of(given))
    assert seen[0] == seen[1]
    assert seen[0].api_keys == {hashlib.sha256(key).digest(): "" for key in (b"a", b"b", b"c")}
    assert "digest" not in repr(seen[0])


def app_values(*words: str, **env: str) -> dict[str, object]:
    """The parsed values of a command line, before any check."""
    command = typer.main.get_command(app)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ({"HOSTNAME": "127.0.0.1"} | env).items():
            patch.setenv(name, value)
        return command.make_context("router", ["--tokenizer-name", "m", *words]).params


def test_a_bad_key_file_ends_the_start_with_its_line(tmp_path):
    file = tmp_path / "keys"
    file.write_text("secret-key\n")
    status, output = run("--api-key-file", str(file))
    assert status == 1 and f"Error: --api-key-file {file}, line 1: not a SHA-256 digest" in output
    assert "secret-key" not in output


def test_defaults_are_as_documented_and_the_environment_overrides_them():
    config = config_of(app_values())
    assert (
        config.http.stream_write_timeout,
        config.http.graceful_termination_timeout,
        config.http.max_connections,
    ) == (30, 90, 4096)
    assert (config.api_keys, config.http.closed_routes, config.launcher_fd) == ({}, False, None)
    config = config_of(
        app_values(
            "--launcher-fd", "5", STREAM_WRITE_TIMEOUT="1.5", GRACEFUL_TERMINATION_TIMEOUT="2", MAX_CONNECTIONS="9"
        )
    )
    assert (
        config.http.stream_write_timeout,
        config.http.graceful_termination_timeout,
        config.http.max_connections,
    ) == (1.5, 2, 9)
    assert config.launcher_fd == 5


def test_shards_are_found_by_the_port_unless_their_socket_is_named(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert config_of(app_values("-p", "81", **environ)).master_shard_uds_path == f"{tmp_path}/tgi-py/81/shard-0"
    named = app_values("-p", "81", "--master-shard-uds-path", "/run/s-0", **environ)
    assert config_of(named).master_shard_uds_path == "/run/s-0"
    folder = tmp_path / "tgi-py" / "81"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "shard-0").touch()
    folder.chmod(0o770)
    status, output = run("-p", "81", **environ)
    assert status == 1 and "open to other users" in output and "Traceback" not in output


def scheduling_of(*words: str, **env: str) -> tuple[object, ...]:
    config = config_of(app_values(*words, **env))
    return config.scheduling.prefix_caching, config.scheduling.admission, config.scheduling.max_queued_tokens


def test_the_scheduler_is_set_by_flags_and_by_the_environment():
    assert scheduling_of() == (True, AdmissionMode.PAST_FUTURE, None)
    words = ("--no-prefix-caching", "--admission", "peak", "--max-queued-tokens", "9")
    environ = {"PREFIX_CACHING": "false", "ADMISSION": "peak", "MAX_QUEUED_TOKENS": "9"}
    assert scheduling_of(*words) == scheduling_of(**environ) == (False, AdmissionMode.PEAK, 9)
    assert scheduling_of("--prefix-caching", "--admission", "reserve", **environ) == (True, AdmissionMode.RESERVE, 9)


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), ("False", False), ("true", True), ("", True)])
def test_prefix_caching_in_the_environment_is_written_as_for_tgis_shards(value, on):
    assert scheduling_of(PREFIX_CACHING=value)[0] is on


@pytest.mark.parametrize(("flag", "value"), [("--admission", "greedy"), ("--max-queued-tokens", "many")])
def test_wrong_usage_exits_with_2_and_names_the_flag(flag, value):
    status, output = run(flag, value)
    assert status == 2 and f"'{flag}'" in output


def test_the_kernels_send_buffer_is_bounded():
    with bind(config()) as listener:
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES


def test_descriptors_for_all_connections_are_allowed_where_possible(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        allow_descriptors(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 200
        allow_descriptors(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 200 and not caplog.records
        if hard != resource.RLIM_INFINITY:
            allow_descriptors(hard)
            assert "raise `ulimit -n`" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        *TABLES["contradictions"],
        ({"graceful_termination_timeout": float("nan")}, "`graceful_termination_timeout` must be a finite number"),
    ],
)
def test_contradictions_have_tgis_texts(changes, text):
    with pytest.raises(StartError) as caught:
        check(with_flags(FLAGS, **changes), has_keys=False)
    assert str(caught.value) == text


def test_no_adapter_has_a_name_of_the_model():
    for name in ("tgi", "mine"):
        flags = with_flags(FLAGS, served_model_name="mine", lora_adapters=f"good=/x@{'0' * 64},{name}=/y@{'1' * 64}")
        with pytest.raises(StartError, match=f"--lora-adapters names {name}, which means the model itself"):
            adapters_of(flags)


def test_defaults_contradict_nothing():
    check(FLAGS, has_keys=False)


def test_a_bound_port_stays_closed_until_it_is_served():
    with bind(config()) as listener, socket.socket() as client:
        assert client.connect_ex(listener.getsockname()) != 0


def test_the_error_for_a_taken_port_names_it():
    with bind(config()) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(StartError, match=rf"cannot listen on 127.0.0.1:{port}"):
            bind(config(port=port))


def test_an_inherited_descriptor_replaces_the_address():
    with socket.create_server(("127.0.0.1", 0)) as parent:
        listener = bind(config(listen_fd=parent.fileno(), hostname="203.0.113.1"))
        assert listener.getsockname() == parent.getsockname()
        listener.detach()
    with pytest.raises(StartError, match="--listen-fd 9999 is not a socket"):
        bind(config(listen_fd=9999))


def test_the_name_of_a_container_is_every_address():
    with bind(config(hostname="3f2a")) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_the_router_loads_neither_what_shards_compute_with_nor_what_the_first_request_does_not_need():
    unwanted = {"torch", "transformers", "huggingface_hub", "text_generation_router.openapi.document"}
    modules = "text_generation_router.resolve, text_generation_router.serve, text_generation_router.serve_engine"
    code = f"import sys, {modules}; print(sorted({unwanted} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_trusted_proxies_come_from_flags_and_the_environment():
    by_flag = config_of(app_values("--trusted-proxy", "10.0.0.0/8", "--trusted-proxy", "fd00::7"))
    assert by_flag == config_of(app_values(TRUSTED_PROXY="10.0.0.0/8 fd00::7"))
    assert list(map(str, by_flag.trusted_proxies)) == ["10.0.0.0/8", "fd00::7/128"]
    status, output = run("--trusted-proxy", "proxy.local")
    assert status == 1 and "Error: --trusted-proxy proxy.local is not an IP address or network" in output


def test_uvicorn_does_not_read_forwarding_headers():
    """By default uvicorn trusts forwarding headers from any client on this host."""
    http = uvicorn_config(Starlette(), ConnectionLimits(1, 1, 1.0), LimitHits(Metrics()))
    http.load()
    assert isinstance(http.loaded_app, Starlette)


def test_threads_give_the_interpreter_lock_back_to_the_event_loop_within_a_millisecond():
    before = sys.getswitchinterval()
    try:
        with pytest.raises(StartError):
            run_router(config(listen_fd=9999))
        assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(before)


def test_the_addresses_are_logged_with_the_real_port_and_the_model_s_name(caplog):
    caplog.set_level("INFO")
    mention_addresses(config(port=0, hostname="0.0.0.0", served_model_name="mine"), 41234)
    (record,) = caplog.records
    assert record.getMessage() == "Serving mine"
    api = "http://localhost:41234"
    assert record.fields == {"api": api, "docs": f"{api}/docs", "metrics": f"{api}/metrics"}


def test_the_model_s_name_is_the_flag_s_or_the_id():
    assert resolve(FLAGS).served_model_name == "m"
    assert resolve(with_flags(FLAGS, served_model_name="mine")).served_model_name == "mine"
