"""llama.cpp's server (`llama_cpp.server`) from its own virtual environment. It serves one stream at a time."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from text_generation_benchmark.load import Completions
from text_generation_benchmark.process import ServerCommand, free_port, running
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.workload import Run, check_counts, loads_on

CONTEXT = 4096
WRITER = Path(__file__).with_name("gguf_file.py")


def is_installed(environment: Path) -> bool:
    return any(environment.glob("lib/python*/site-packages/llama_cpp/server"))


def server_command(environment: Path, model_file: Path) -> ServerCommand:
    port, cores = free_port(), str(os.cpu_count())
    arguments = [str(environment / "bin" / "python"), "-m", "llama_cpp.server", "--model", str(model_file)]
    arguments += ["--model_alias", "peer", "--host", "127.0.0.1", "--port", str(port), "--n_ctx", str(CONTEXT)]
    arguments += ["--n_threads", cores, "--n_threads_batch", cores, "--logits_all", "false", "--verbose", "false"]
    return ServerCommand("llama.cpp", arguments, port, "/v1/models", start_s=120)


@contextlib.contextmanager
def running_llama_cpp(environment: Path, model: Path) -> Iterator[Run]:
    """Writes the model as a GGUF file, starts the server, and stops it at the end of the context.

    RuntimeError if the model cannot be written as GGUF, or does not start.
    """
    dialect = Completions("peer", {})
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
        file = Path(folder) / "model.gguf"
        written = subprocess.run(
            [environment / "bin" / "python", WRITER, model, file], stderr=subprocess.PIPE, text=True
        )
        if written.returncode:
            raise RuntimeError(f"no GGUF file of {model}: {written.stderr}")
        command = server_command(environment, file)
        with running(command, Path(folder) / "log"):
            check_counts(command.port, dialect, Prompts(model))
            yield loads_on(command.port, dialect, Prompts(model))
