"""Runs the official clients, each in a virtual environment of its own, against a server:

    .venv/bin/python integration-tests/clients/run_clients.py [URL]

Without a URL, starts `text-generation-launcher` on the demo model, in float32 and with a chat template that has a place
for results of calls, and stops the launcher in the end. The exit status is 1 if a check fails."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy
from safetensors.numpy import save_file

from text_generation_benchmark.process import ServerCommand, free_port, running
from text_generation_common.model_files import demo_directory

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"

START_S = 120.0
CHECKS_S = 600.0
UNREACHABLE = "after connection broken by"  # what pip says when the registry does not answer
ADAPTER = "loud"  # the name of the adapter of one of the two servers
# lm-eval compares with transformers in float32; a request of langchain-openai has six prompts.
SERVER_FLAGS = ("--dtype", "float32", "--max-client-batch-size", "8")

# The demo model's, with results of calls as the user's messages; the demo model itself knows no results.
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- "<|" ~ ("user" if message.role == "tool" else message.role) ~ "|>" ~ (message.content or "") -}}
{%- for call in message.tool_calls or [] -%}{{- call.function | tojson -}}{%- endfor -%}
{{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class OfficialClient:
    name: str  # name of the virtual environment in which the client is installed
    packages: tuple[str, ...]
    scripts: tuple[str, ...]
    first: tuple[str, ...] = ()  # packages that are installed before the others
    chooser: str = ""  # the library of check_adapters.py that this client is; "": none


@dataclass(frozen=True, slots=True)
class InstalledProgram:
    """A client that is too large to be installed for its checks: an installed one is taken, or none."""

    name: str
    variable: str  # environment variable that tells the program's path
    default: Path  # the program's path without the variable
    hint: str  # how to install it
    script: str


LANGCHAIN = ("check_langchain_openai.py", "check_langchain_tools.py")
OPENAI = ("check_openai.py", "check_openai_tools.py")
CLIENTS = (
    OfficialClient("text-generation", ("text-generation==0.7.0",), ("check_text_generation.py",)),
    # The asynchronous client of huggingface_hub 0 needs aiohttp, and does not require it.
    OfficialClient("huggingface-hub-0", ("huggingface_hub==0.36.*", "aiohttp"), ("check_huggingface_hub.py",)),
    OfficialClient(
        "huggingface-hub-2", ("huggingface_hub>=2,<3",), ("check_huggingface_hub.py",), chooser="huggingface_hub"
    ),
    OfficialClient("openai-2", ("openai>=2,<3",), OPENAI),
    OfficialClient("openai-3", ("openai>=3,<4",), OPENAI, chooser="openai"),
    OfficialClient("anthropic", ("anthropic",), ("check_anthropic.py",)),
    OfficialClient("langchain-openai", ("langchain-openai>=1",), LANGCHAIN),
    OfficialClient("langchain-huggingface", ("langchain-huggingface>=1",), ("check_langchain_huggingface.py",)),
    OfficialClient("llama-index", ("llama-index-llms-openai-like",), ("check_llama_index.py",)),
    OfficialClient("instructor", ("instructor",), ("check_instructor.py",)),
    # Tools of litellm need mcp, which litellm does not require.
    OfficialClient("litellm", ("litellm", "mcp"), ("check_litellm.py",)),
    # The build of torch that its version alone names; with lm-eval's own requirement pip may take another one.
    OfficialClient("lm-eval", ("lm-eval[api,hf]>=0.4.9",), ("check_lm_eval.py",), first=("torch==2.13.0",)),
    OfficialClient("guidellm", ("guidellm",), ("check_guidellm.py",)),
    OfficialClient("locust", ("locust",), ("check_locust.py",)),
)
OWN = "own"  # this repository's client, which tests of its own check
BROWSER = "browser"  # OpenAI's and Anthropic's libraries for browsers
PROGRAMS = (
    InstalledProgram(
        "vllm-bench",
        "VLLM",
        HERE.parents[1] / ".venv-vllm" / "bin" / "vllm",
        "`make bench-peers` installs it",
        "check_vllm_bench.py",
    ),
)


class Failure(Exception):
    """The checks could not be run; the text says why in one line."""


class NoRegistry(Failure):
    """The registry of packages did not answer."""


def install(client: OfficialClient) -> Path:
    """Path of the Python interpreter in the client's environment. The environment is made anew unless it has exactly
    the client's packages."""
    root = ENVIRONMENTS / client.name
    python = root / "bin" / "python"
    stamp = root / "installed"
    wanted = "\n".join((*client.first, *client.packages))
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(root, clear=True)
    for packages in (client.first, client.packages):
        if packages:
            pip_install(python, packages)
    stamp.write_text(wanted)
    return python


def check_browser(url: str, model: Path) -> bool:
    """Installs the packages of browser/package.json, and runs them in Chromium. A missing browser is a failure."""
    root = ENVIRONMENTS / BROWSER
    shutil.copytree(HERE / BROWSER, root, dirs_exist_ok=True)
    npm = shutil.which("npm")
    if npm is None:
        raise Failure("there is no npm on PATH; `apt-get install npm` installs it")
    command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts", "--loglevel=error"]
    if subprocess.run(command, cwd=root).returncode:
        raise Failure("the packages of browser/package.json could not be installed; see npm's lines above")
    return run_script(BROWSER, [sys.executable, str(HERE / "check_browser.py"), url, str(model), str(root)])


def pip_install(python: Path, packages: tuple[str, ...]) -> None:
    # With the pip of this environment. A client imports a small part of what is installed, so only that is compiled.
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
    command += ["--disable-pip-version-check", *packages]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        kind = NoRegistry if UNREACHABLE in done.stderr else Failure
        raise kind(f"{' '.join(packages)!r} could not be installed; see pip's lines above")


def check(client: OfficialClient, url: str, model: Path, with_adapter: str = "") -> bool:
    """`with_adapter`: the URL of a server with an adapter; "": there is none."""
    python = str(install(client))
    outcomes = [run_script(client.name, [python, str(HERE / script), url, str(model)]) for script in client.scripts]
    return all(outcomes) and (
        not (with_adapter and client.chooser) or check_adapters(python, with_adapter, client.chooser)
    )


def check_adapters(python: str, url: str, library: str) -> bool:
    return run_script(library, [python, str(HERE / "check_adapters.py"), url, ADAPTER, library])


def check_program(program: InstalledProgram, url: str, model: Path) -> bool | None:
    """None if the program is not installed."""
    path = Path(os.environ.get(program.variable) or program.default)
    if not path.exists():
        print(f"SKIP {program.name}: no {path}: {program.hint}, or set {program.variable} to the program's path")
        return None
    return run_script(program.name, [sys.executable, str(HERE / program.script), url, str(model), str(path)])


def run_script(name: str, command: list[str]) -> bool:
    """Runs a client's script, which prints one line for each check. The user's tokens, keys and proxies are not passed
    on."""
    kept = {name: value for name, value in os.environ.items() if name in ("LANG", "PATH", "TMPDIR")}
    kept |= {
        "HOME": str(ENVIRONMENTS),
        "HF_HOME": str(ENVIRONMENTS),
        "PYTHONPYCACHEPREFIX": str(ENVIRONMENTS / "bytecode"),
    }
    try:
        return subprocess.run(command, env=kept, timeout=CHECKS_S).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"FAIL {name}: the checks did not end within {CHECKS_S:g} s")
        return False


@contextmanager
def with_results(model: Path) -> Iterator[Path]:
    """A folder that is the model, with a chat template that also has a place for calls and their results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / model.name
        folder.mkdir()
        for file in model.iterdir():
            (folder / file.name).symlink_to(file)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        yield folder


def write_adapter(folder: Path, model: Path) -> None:
    """An adapter that changes texts."""
    config, draw = json.loads((model / "config.json").read_text()), numpy.random.default_rng(1)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    shapes = {"A": (4, config["intermediate_size"]), "B": (config["hidden_size"], 4)}
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_{}.weight"
    tensors = {name.format(side): draw.normal(size=shape).astype("float32") for side, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


@contextmanager
def server_with_adapter(model: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        write_adapter(Path(name) / ADAPTER, model)
        with started_server(model, "--lora-adapters", f"{ADAPTER}={name}/{ADAPTER}") as url:
            yield url


@contextmanager
def started_server(model: Path, *flags: str) -> Iterator[str]:
    launcher = shutil.which("text-generation-launcher")
    if launcher is None:
        raise Failure("there is no text-generation-launcher on PATH; install tgi-py first, or give the URL of a server")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        arguments = [launcher, "--model-id", str(model), "--hostname", "127.0.0.1", "--port", str(port)]
        arguments += ["--shard-uds-path", f"{folder}/shard", *SERVER_FLAGS, *flags]
        with running(ServerCommand("the server", arguments, port, "/health", START_S), Path(folder) / "log"):
            yield f"http://127.0.0.1:{port}"


def main() -> int:
    names = [*(client.name for client in (*CLIENTS, *PROGRAMS)), OWN, BROWSER]
    parser = argparse.ArgumentParser(description="Run the official clients against a server.")
    parser.add_argument(
        "url", nargs="?", help=f"URL of a server that runs with {' '.join(SERVER_FLAGS)}; without it, one is started"
    )
    parser.add_argument("--model", type=Path, default=demo_directory(), help="folder of the server's model")
    parser.add_argument("--only", choices=names, nargs="+", default=names, help="run these clients alone")
    arguments = parser.parse_args()
    try:
        if arguments.url:
            return run_all(arguments.only, arguments.url.rstrip("/"), arguments.model)
        with with_results(arguments.model) as model, started_server(model) as url, server_with_adapter(model) as other:
            return run_all(arguments.only, url, model, other)
    except (Failure, RuntimeError) as failure:
        print(f"run_clients: {failure}", file=sys.stderr)
        return 1


def run_all(names: list[str], url: str, model: Path, with_adapter: str = "") -> int:
    outcomes: dict[str, bool | None] = {}
    outcomes |= {client.name: check(client, url, model, with_adapter) for client in CLIENTS if client.name in names}
    if OWN in names and with_adapter:
        outcomes[OWN] = check_adapters(sys.executable, with_adapter, "text_generation")
    if BROWSER in names:
        outcomes[BROWSER] = check_browser(url, model)
    outcomes |= {program.name: check_program(program, url, model) for program in PROGRAMS if program.name in names}
    failed, skipped = ([name for name, outcome in outcomes.items() if outcome is kind] for kind in (False, None))
    rest = f"; skipped: {', '.join(skipped)}" if skipped else ""
    passed = f"{len(outcomes) - len(skipped)} clients passed"
    print((f"failed: {', '.join(failed)}" if failed else passed) + rest)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
