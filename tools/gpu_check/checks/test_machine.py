"""The machine and its libraries; compute-sanitizer on a few kernels, or on the first test that has failed."""

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from gpu_check.device import GPU, Measured
from gpu_check.plugin import read

ROOT = Path(__file__).parents[3]
TABLE = "server/text_generation_server/kernels/tests/test_kernels.py"
FEW = "triton and float16 and (silu_mul_takes or embed_picks or rope_turns or padding_rows or sizes_need)"


def test_what_it_runs_on(measured: Measured) -> None:
    facts = {"Python": platform.python_version(), "cores": str(os.cpu_count())}
    facts |= {name: version(name) for name in ("torch", "triton", "transformers", "grpcio", "protobuf")}
    if GPU:
        about, query = torch.cuda.get_device_properties(0), "driver_version,clocks.max.sm,clocks.max.mem,power.limit"
        facts |= {"GPU": f"{about.name}, {about.total_memory / 2**30:.1f} GiB", "CUDA": str(torch.version.cuda)}
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        facts[query] = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    for name, value in facts.items():
        measured("Environment", {"what": name, "value": value})


@pytest.mark.limit(130)
def test_the_sanitizer_finds_no_bad_access_to_memory(pytestconfig: pytest.Config, measured: Measured) -> None:
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    journal = pytestconfig.getoption("journal", None)
    failed = [test for test, entry in read(Path(journal)).items() if entry["outcome"] == "failed"] if journal else []
    chosen = failed[:1] or [TABLE, "-k", FEW]
    # torch's allocator would hand out parts of large blocks, within which no access is out of bounds.
    variables = "PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"
    command = f"env {variables} {program} --tool memcheck --error-exitcode 9 {sys.executable} -m pytest -q -s".split()
    done = subprocess.run([*command, *chosen], capture_output=True, text=True, timeout=120, cwd=ROOT)
    found = "\n".join(line for line in (done.stdout + done.stderr).splitlines() if "=====" in line)
    measured("compute-sanitizer", {"of": chosen[0], "said": (found.splitlines() or ["nothing"])[-1].strip("= ")})
    assert done.returncode in (0, 1), found[:4000] or done.stdout[-4000:]  # 1: a test has failed for another reason
