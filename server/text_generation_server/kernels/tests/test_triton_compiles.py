"""The Triton kernels compile for real GPUs: the interpreter does not check types, layouts and shared memory."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

SCRIPT = Path(__file__).with_name("compile_triton.py")
KERNELS = {
    "_add_bias", "_advance", "_apply", "_attend_runs", "_attend_split", "_check_block", "_count", "_cut", "_draw_block",
    "_embed", "_merge", "_merge_blocks", "_place", "_rms_norm", "_rope_and_store_kv", "_silu_mul",
}  # fmt: skip
# Bytes of shared memory that a program may use on GPUs of compute capability 8.6 and 8.9, which have the least of all.
SHARED_MEMORY = 99 * 1024


def compiled(what: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, what]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_all_kernels_compile_in_all_types_and_fit_the_smallest_gpu() -> None:
    kernels = compiled("types")
    assert {kernel["kernel"] for kernel in kernels} == KERNELS
    assert not [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY]


def test_nothing_is_compiled_again_while_serving() -> None:
    """No size of a step, and no address of its vectors, makes Triton compile a kernel again."""
    forms = {(kernel["kernel"], kernel["hash"]) for kernel in compiled("serving")}
    of_each = Counter(name for name, _ in forms)
    assert of_each.pop("_rms_norm") == 2  # compiled twice: with and without the addition of the residual
    assert set(of_each.values()) == {1}
