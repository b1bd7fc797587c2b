"""vLLM's build for CPUs, as its own server: `vllm serve` out of a virtual environment of its own."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from text_generation_benchmark.load import Completions, LoadResult
from text_generation_benchmark.process import ServerCommand, free_port, running
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.workload import Workload, check_counts, measure

CONTEXT = 4096
START_S = 900  # it compiles the model when it starts
# Left to itself it keeps one core for its scheduler, which is half of a machine with two.
EVERY_CORE = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}


def is_installed(environment: Path) -> bool:
    return (environment / "bin" / "vllm").exists()


def server_command(environment: Path, model: Path, more: Mapping[str, str]) -> ServerCommand:
    port = free_port()
    context = min(CONTEXT, json.loads((model / "config.json").read_text())["max_position_embeddings"])
    arguments = [str((environment / "bin" / "vllm").absolute()), "serve", str(model), "--served-model-name", "peer"]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(context)]
    arguments += ["--no-enable-prefix-caching"]
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}
    return ServerCommand("vLLM", arguments, port, "/health", START_S, settings | dict(more))


def measure_vllm(
    environment: Path, model: Path, workloads: Sequence[Workload], more: Mapping[str, str] = MappingProxyType({})
) -> dict[Workload, LoadResult]:
    options = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    dialect, prompts = Completions("peer", options), Prompts(model)
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
        command = server_command(environment, model, more)
        with running(command, Path(folder) / "log"):
            check_counts(command.port, dialect, Prompts(model))
            return {workload: measure(command.port, dialect, prompts, workload) for workload in workloads}
