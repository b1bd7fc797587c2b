"""The peers that are measured beside this server: vLLM's build for CPUs and llama.cpp's server, each from a virtual
environment of its own, and transformers' `generate`."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from text_generation_benchmark.load import Completions
from text_generation_benchmark.peers.transformers_generate import running_transformers
from text_generation_benchmark.process import ServerCommand, free_port, running
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.report import Peer
from text_generation_benchmark.workload import Run, check_counts, loads_on

CONTEXT = 4096
KV_GIB = "1"  # GiB of vLLM's KV cache: enough for every load here, but small, because all servers share the memory
START_S = 900  # vLLM compiles the model when it starts
# By default vLLM keeps one core for its scheduler, which is half of a machine with two cores.
EVERY_CORE = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
# Programs that run in llama.cpp's virtual environment.
WRITER = Path(__file__).with_name("gguf_file.py")
LIBRARY = Path(__file__).with_name("llama_library.py")
LLAMA_SLOTS = 64  # streams at a time
# What makes llama.cpp's server fastest: with one cache for all streams a prompt takes 1.4 times as long, and a cache of
# earlier prompts would copy the keys and values of each request.
LLAMA_FLAGS = "--no-kv-unified", "--flash-attn", "on", "--cache-ram", "0", "--no-ui", "--offline"
TRAINED = "demo"
SLOW_ON_CPUS = ("m1b",)  # not measured with transformers, which would take minutes


@dataclass(frozen=True, slots=True)
class Folders:
    """Folders of the peers' virtual environments. If a folder does not exist, its peer is not installed."""

    vllm: Path
    llama_cpp: Path


@dataclass(frozen=True, slots=True)
class Contender:
    """A peer, how to start it (None if it is not installed), and the models it cannot serve. The server answers inside
    the context; RuntimeError if it does not start."""

    peer: Peer
    start: Callable[[Path], AbstractContextManager[Run]] | None
    lacks: tuple[str, ...] = ()
    max_streams: int = sys.maxsize


def vllm(folder: Path) -> list[Contender]:
    """vLLM with two settings: its default, which keeps one core for its scheduler, and all cores. Neither is faster
    under every load.
    """
    if not (folder / "bin" / "vllm").exists():
        return [_missing("vLLM-CPU", folder)]
    said = _printed(folder, "import importlib.metadata as m; print(m.version('vllm-cpu'))")
    by_default = Peer("vLLM-CPU", said, "vLLM-CPU keeps one core for its scheduler unless told to use all cores")
    every_core = Peer("vLLM-CPU, all cores", said)
    return [
        Contender(by_default, lambda model: _running_vllm(folder, model)),
        Contender(every_core, lambda model: _running_vllm(folder, model, EVERY_CORE)),
    ]


def llama_cpp(folder: Path) -> Contender:
    if not (folder / "bin" / "llama-server").exists():
        return _missing("llama.cpp", folder)
    version = _printed(folder, "import llama_cpp; print(llama_cpp.__version__)")
    return Contender(
        Peer("llama.cpp", f"(of llama-cpp-python {version})"),
        lambda model: _running_llama_cpp(folder, model),
        max_streams=LLAMA_SLOTS,
    )


def transformers() -> Contender:
    return Contender(Peer("transformers", version("transformers")), running_transformers, SLOW_ON_CPUS)


def _missing(name: str, folder: Path) -> Contender:
    return Contender(Peer(name, "", f"{name} is not installed in {folder}, `make bench-peers` installs it"), None)


def _printed(environment: Path, code: str) -> str:
    command = [str(environment / "bin" / "python"), "-c", code]
    printed: str = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return printed.strip()


@contextlib.contextmanager
def _running_vllm(environment: Path, model: Path, more: Mapping[str, str] = MappingProxyType({})) -> Iterator[Run]:
    with running_vllm(environment, model, more) as (port, dialect):
        yield _checked(port, dialect, model)


@contextlib.contextmanager
def running_vllm(
    environment: Path, model: Path, more: Mapping[str, str] = MappingProxyType({}), flags: Sequence[str] = ()
) -> Iterator[tuple[int, Completions]]:
    """Gives the port of the server, and how the server is asked."""
    port = free_port()
    config = json.loads((model / "config.json").read_text())
    context = min(CONTEXT, config.get("max_position_embeddings", CONTEXT))  # a BLOOM has no greatest position
    arguments = [str((environment / "bin" / "vllm").absolute()), "serve", str(model), "--served-model-name", "peer"]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(context)]
    arguments += ["--no-enable-prefix-caching", *flags]
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": KV_GIB}
    command = ServerCommand("vLLM", arguments, port, "/health", START_S, environment=settings | dict(more))
    options = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder, running(command, Path(folder) / "log"):
        yield port, Completions("peer", options)


@contextlib.contextmanager
def _running_llama_cpp(environment: Path, model: Path) -> Iterator[Run]:
    """Writes the model as a GGUF file first. RuntimeError if it cannot be written."""
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
        run_in(environment, WRITER, model, file := Path(folder, "model.gguf"))
        with llama_server(environment, file, model, LLAMA_SLOTS) as run:
            yield run


def run_in(environment: Path, program: Path, *arguments: object) -> None:
    """Runs a program in a peer's virtual environment. RuntimeError, with the end of what it has said, if it fails."""
    command = [str(environment.absolute() / "bin" / "python"), str(program), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")


@contextlib.contextmanager
def llama_server(
    environment: Path, file: Path, model: Path, streams: int, instead: Sequence[str] = ()
) -> Iterator[Run]:
    """llama.cpp's server on a GGUF file. `model`: the folder with the tokenizer. `instead`: the server of a fork, and
    what makes it fastest."""
    port, cores = free_port(), str(os.cpu_count() or 1)
    program, *flags = instead or (str(environment.absolute() / "bin" / "llama-server"), *LLAMA_FLAGS)
    arguments = [program, "--model", str(file), "--alias", "peer"]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--threads", cores, "--threads-batch", cores]
    arguments += ["--parallel", str(streams), "--ctx-size", str(streams * CONTEXT), *flags]
    options = {"ignore_eos": True, "cache_prompt": False, "stream_options": {"include_usage": True}}
    with (
        tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder,
        running(ServerCommand("llama.cpp", arguments, port, "/health", start_s=300), Path(folder) / "log"),
    ):
        yield _checked(port, Completions("peer", options), model)


def _checked(port: int, dialect: Completions, model: Path) -> Run:
    check_counts(port, dialect, Prompts(model))
    return loads_on(port, dialect, Prompts(model))
