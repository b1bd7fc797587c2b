"""--print-config: values with their sources, what is refused, in environments as platforms make them; and what is not
shown."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from text_generation_common.flags.declaration import values_of
from text_generation_launcher import cli
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.print_config import _ORIGINS
from text_generation_launcher.resolve import DEVICE_VARIABLES
from text_generation_launcher.tests.slowness import Seconds, assert_within


@dataclass(frozen=True)
class Environment:
    """An environment and a command line, some lines of the answer, and the causes of what is refused."""

    name: str
    variables: dict[str, str]
    words: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


DOCKER = {"HF_HOME": "/no/data", "HF_HUB_ENABLE_HF_TRANSFER": "1", "PORT": "80", "HOSTNAME": "4f2a9c1d"}
ENVIRONMENTS = (
    Environment(
        "TGI's Docker image, as its README starts it",
        DOCKER | {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"},
        ("--model-id", "HuggingFaceH4/zephyr-7b-beta", "--num-shard", "2"),
        (
            'model-id = "HuggingFaceH4/zephyr-7b-beta" # flag',
            "num-shard = 2 # flag",
            "port = 80 # variable PORT",
            '# hostname = "4f2a9c1d" # variable HOSTNAME; resolved to "0.0.0.0"',
            '# HF_HOME = "/no/data"',
            "# note: HuggingFaceH4/zephyr-7b-beta is not on this machine: it is checked when it is downloaded",
        ),
    ),
    Environment(
        "SageMaker, behind the entry point of TGI's image",
        DOCKER
        | {"HF_MODEL_ID": "tiiuae/falcon-7b", "MODEL_ID": "tiiuae/falcon-7b", "SM_NUM_GPUS": "4", "NUM_SHARD": "4"}
        | {"HF_MODEL_QUANTIZE": "exl2", "QUANTIZE": "exl2", "SAGEMAKER_CONTAINER_LOG_LEVEL": "20"}
        | {"HF_MODEL_TRUST_REMOTE_CODE": "true", "TRUST_REMOTE_CODE": "true", "REVISION": "main"},
        ("--port", "8080"),
        (
            "port = 8080 # flag",
            "num-shard = 4 # variable NUM_SHARD",
            'revision = "main" # variable REVISION',
            '# quantize = "exl2" # variable QUANTIZE: refused',
            "# trust-remote-code = true # variable TRUST_REMOTE_CODE: refused",
            "# HF_MODEL_ID is set, and the launcher does not read it",
        ),
        ("--trust-remote-code is not supported yet", "--quantize exl2 is not supported yet"),
    ),
    Environment(
        "Kubernetes, with a secret, a device plugin and the links of a service",
        {"HOSTNAME": "tgi-7d9f-x2x", "HF_TOKEN": "hf_hush", "NVIDIA_VISIBLE_DEVICES": "GPU-1a,GPU-2b", "PORT": "3000"}
        | {"MODEL_ID": "org/m", "KUBERNETES_PORT": "tcp://10.0.0.1:443", "TGI_PORT": "tcp://10.0.0.7:80"}
        | {"TGI_SERVICE_HOST": "10.0.0.7", "JSON_OUTPUT": "true", "MAX_CONCURRENT_REQUESTS": "512"},
        lines=(
            "# num-shard = 2 # resolved from NVIDIA_VISIBLE_DEVICES",
            "max-concurrent-requests = 512 # variable MAX_CONCURRENT_REQUESTS",
            "json-output = true # variable JSON_OUTPUT",
            "# HF_TOKEN is set, and not shown",
        ),
    ),
    Environment(
        "Inference Endpoints: the model in /repository, TGI's old names",
        {"MAX_BATCH_PREFILL_TOKENS": "2048", "MAX_INPUT_LENGTH": "1024", "MAX_TOTAL_TOKENS": "1512", "PORT": "80"}
        | {"HF_TASK": "text-generation", "MODEL_ID": "{model}", "DTYPE": "bfloat16"},
        lines=(
            "max-input-length = 1024 # variable MAX_INPUT_LENGTH",
            "# max-input-tokens = 1024 # resolved from --max-input-length",
            "max-batch-prefill-tokens = 2048 # variable MAX_BATCH_PREFILL_TOKENS",
            'model-id = "{model}" # variable MODEL_ID',
            '# served-model-name = "model" # resolved from --model-id',
            'dtype = "bfloat16" # variable DTYPE',
        ),
    ),
    Environment(
        "compose, in which variables of the file are not set",
        {"NUM_SHARD": "", "QUANTIZE": "", "HF_TOKEN": "", "REVISION": "", "CUDA_VISIBLE_DEVICES": ""},
        ("--model-id", "{model}"),
        ("# num-shard = 1 # resolved from CUDA_VISIBLE_DEVICES", "# quantize is not set # default"),
    ),
    Environment(
        "compose, in which the model is not set, and a key is empty",
        {"MODEL_ID": "", "API_KEY": ""},
        lines=('# model-id = "" # variable MODEL_ID: refused', '# api-key = "" # variable API_KEY: refused'),
        refused=("MODEL_ID in the environment is empty", "API_KEY in the environment is empty"),
    ),
    Environment(
        "Kubernetes, with services of the names prometheus and master",
        {"PROMETHEUS_PORT": "tcp://10.0.0.9:9090", "MASTER_PORT": "udp://10.0.0.8:53", "MODEL_ID": "{model}"}
        | {"PROMETHEUS_SERVICE_HOST": "10.0.0.9", "PROMETHEUS_PORT_9090_TCP": "tcp://10.0.0.9:9090"}
        | {"PORT": "tcp://10.0.0.9:80", "HOSTNAME": "tgi-7d9f-x2x"},
        lines=(
            "# port = 3000 # default",
            "# prometheus-port is not set # default",
            *(
                f"# note: {name} in the environment is the address of a Service, as Kubernetes sets it, and has no"
                " effect; the pod's `enableServiceLinks: false` leaves it out"
                for name in ("PORT", "PROMETHEUS_PORT", "MASTER_PORT")
            ),
        ),
    ),
    Environment(
        "switches as Python and shells write them",
        {"JSON_OUTPUT": "True", "DISABLE_CUSTOM_KERNELS": "1", "PREFIX_CACHING": "0", "MODEL_ID": "{model}"},
        lines=(
            '# json-output = "True" # variable JSON_OUTPUT: refused',
            '# disable-custom-kernels = "1" # variable DISABLE_CUSTOM_KERNELS: refused',
            "prefix-caching = false # variable PREFIX_CACHING",
        ),
        refused=("JSON_OUTPUT in the environment is 'True'", "DISABLE_CUSTOM_KERNELS in the environment is '1'"),
    ),
    Environment(
        "keys, and a login in an address",
        {"API_KEY": "hush1 hush2", "ADMIN_API_KEY": "hush3", "MODEL_ID": "{model}", "HF_API_TOKEN": "hush4"}
        | {"HF_ENDPOINT": "https://user:hush5@mirror", "NGROK_AUTHTOKEN": "hush6"}
        | {"OTLP_ENDPOINT": "http://user:hush7@collector:4317"},
        lines=(
            "# api-key is set, and not shown # variable API_KEY",
            "# admin-api-key is set, and not shown # variable ADMIN_API_KEY",
            "# ngrok-authtoken is set, and not shown # variable NGROK_AUTHTOKEN: refused",
            "# HF_API_TOKEN is set, and not shown",
            "# HF_ENDPOINT is set, and not shown",
            "# otlp-endpoint is set, and not shown # variable OTLP_ENDPOINT",
        ),
        refused=("--ngrok-authtoken is not supported yet",),
    ),
    Environment(
        "numbers that contradict each other",
        {"MAX_INPUT_TOKENS": "2048", "MAX_TOTAL_TOKENS": "2048", "MODEL_ID": "{model}", "SPECULATE": "2"},
        lines=(
            "max-input-tokens = 2048 # variable MAX_INPUT_TOKENS",
            "# note: Values that are made of others are not known before the last error is mended",
        ),
        refused=("--speculate is not supported yet", "`max_input_tokens`(2048) must be < `max_total_tokens`(2048)"),
    ),
    Environment(
        "more than the model was made for",
        {"MAX_TOTAL_TOKENS": "4096", "MODEL_ID": "{model}"},
        lines=("max-total-tokens = 4096 # variable MAX_TOTAL_TOKENS",),
        refused=("4096",),
    ),
    Environment(
        "a folder without a model",
        {"MODEL_ID": "{model}/none"},
        lines=('model-id = "{model}/none" # variable MODEL_ID',),
        refused=("model directory {model}/none does not exist",),
    ),
    Environment(
        "replicas on GPUs, and positions that are stretched",
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "REPLICAS": "2", "MODEL_ID": "{model}", "ROPE_FACTOR": "2.0"},
        lines=(
            "# num-shard = 2 # resolved from CUDA_VISIBLE_DEVICES",
            "# api-workers = 1 # resolved from --replicas",
            '# rope-scaling = "linear" # resolved from --rope-factor',
            "rope-factor = 2.0 # variable ROPE_FACTOR",
        ),
    ),
    Environment(
        "systemd, with a file of which the environment overrides a value",
        {"TGI_CONFIG": "{file}", "MAX_BEST_OF": "5", "XDG_RUNTIME_DIR": "/run/tgi", "LOG_LEVEL": "info"},
        lines=(
            'model-id = "{model}" # file {file}',
            "max-best-of = 5 # variable MAX_BEST_OF",
            'hostname = "127.0.0.1" # file {file}',
            "# max-batch-prefill-tokens = 2048 # resolved from --model-id",
            "# usage-stats is not set # default",
            '# LOG_LEVEL = "info"',
            "# note: Every user of this machine can read {file}, with api-key: chmod o-r {file}",
        ),
    ),
    Environment(
        "TGI's flags without effect, and variables of its shards",
        {"USAGE_STATS": "off", "MASTER_PORT": "29501", "ATTENTION": "flashinfer", "CUDA_GRAPHS": "1,2,4"},
        ("--model-id", "{model}", "--shard-uds-path", "/tmp/s"),
        (
            'usage-stats = "off" # variable USAGE_STATS',
            'cuda-graphs = "1,2,4" # variable CUDA_GRAPHS',
            "# ATTENTION is set, and the launcher does not read it",
            "# note: --usage-stats has no effect: no usage is ever sent",
            "# note: --master-port has no effect: shards meet through a file",
        ),
    ),
)  # fmt: skip


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
