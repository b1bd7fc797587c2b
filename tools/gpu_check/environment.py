"""The machine and the libraries on which the check runs."""

import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from gpu_check.findings import Case, Context, Measured

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "grpcio",
    "protobuf",
    "prometheus_client",
    "starlette",
    "uvicorn",
    "uvloop",
)
QUERY = "driver_version,clocks.max.sm,clocks.max.mem,power.limit"


def describe(context: Context) -> Iterator[Case]:
    def run() -> Iterable[Measured]:
        facts = {"Python": platform.python_version(), "system": platform.platform(), "cores": str(os.cpu_count())}
        facts |= {name: _version(name) for name in PACKAGES}
        facts |= _gpu(context.device) if context.on_gpu else {"GPU": "none: a rehearsal"}
        for name, value in facts.items():
            yield Measured({"what": name, "value": value})

    yield Case("Environment", {"of": "machine"}, run)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gpu(device: torch.device) -> dict[str, str]:
    about = torch.cuda.get_device_properties(device)
    facts = {
        "GPU": about.name,
        "compute capability": f"{about.major}.{about.minor}",
        "multiprocessors": str(about.multi_processor_count),
        "memory": f"{about.total_memory / 2**30:.1f} GiB",
        "CUDA of torch": str(torch.version.cuda),
    }
    return facts | {f"nvidia-smi {QUERY}": _ask_nvidia_smi()}


def _ask_nvidia_smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not available: {error}"
