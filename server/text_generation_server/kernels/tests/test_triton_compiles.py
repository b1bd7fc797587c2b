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
SAMPLERS = {
    "_add_bias", "_allow", "_apply", "_ban", "_check_block", "_count", "_draw_block", "_find_bounds", "_mask",
    "_merge_blocks", "_most_typical", "_prepare_block", "_weigh_block",
}  # fmt: skip
KERNELS = {
    "_activate", "_adapt_down", "_adapt_ids", "_adapt_up", "_add_scored", "_advance", "_embed", "_experts_down",
    "_experts_up", "_layer_norm", "_pair_slots", "_place", "_rms_norm", "_rope_and_store_kv", "_route", "_silu_mul",
    "attend_decode", "attend_prefill",
}  # fmt: skip
CODES = {"_add_splits", "_multiply_codes", "_widen_codes"}
# Kernels that multiply matrices: each generation of GPUs has other instructions for these.
PRODUCTS = {"_adapt_down", "_adapt_up", "_experts_down", "_experts_up", "attend_decode", "attend_prefill"} | CODES
# Bytes of shared memory that a program may use on GPUs of compute capability 8.6, 8.9 and 12.0, which have the least.
LEAST_SHARED_MEMORY = 99 << 10
# By how much more instructions decode attention may take over 8-bit keys than over bfloat16. It is 1.3 to 1.6 with
# Triton 3.6 and 3.9, and was 2.2 when each number was converted by itself.
EIGHT_BITS = 1.8


# Jobs of the script that `make test` runs, in one process, because importing torch and Triton takes seconds.
QUICK = ("products-80", "each-90", "serving")
Kernels = list[dict[str, Any]]


def compiled(*jobs: str) -> dict[str, Kernels]:
    """What the script prints of each job."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, *jobs]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Kernels] = {}
    for line in map(json.loads, result.stdout.splitlines()):
        if (job := line.get("of")) is not None:
            found[job] = kernels = []
        else:
            kernels.append(line)
    assert tuple(found) == jobs
    return found


@pytest.fixture(scope="module")
def quick() -> dict[str, Kernels]:
    return compiled(*QUICK)


@pytest.mark.limit(360)  # the first test runs all jobs of QUICK
@pytest.mark.parametrize(
    ("what", "capability"),
    [
        # Left to `make test-slow`: 14 of 116 forms for capability 9.0, which differ in their type alone from one that
        # stays in bfloat16 (activations, routes, biases and clamped gates of experts, biases of adapters), 4 s; and 37
        # of 57 for 8.0, which have no products and are compiled for 9.0, or are such forms, 12 s.
        ("products", 80),
        ("each", 90),
        *(pytest.param("types", number, marks=pytest.mark.slow) for number in (80, 89, 90, 100)),
    ],
)
def test_all_kernels_compile_fit_their_gpu_and_spill_in_no_loop(
    request: pytest.FixtureRequest, what: str, capability: int
) -> None:
    """GPUs of capabilities 8.x share their tables with those that have the least shared memory."""
    job = f"{what}-{capability}"
    kernels = request.getfixturevalue("quick")[job] if job in QUICK else compiled(job)[job]
    names = {kernel["kernel"] for kernel in kernels}
    if what == "products":
        assert names >= PRODUCTS
    else:
        assert names == KERNELS | (SAMPLERS | CODES if capability != 89 else set())
    assert not [kernel for kernel in kernels if kernel.get("fault")]
    if capability < 90:
        assert not [kernel for kernel in kernels if kernel["shared"] > LEAST_SHARED_MEMORY]
    else:
        decode = [
            kernel["per_key"] for kernel in kernels if kernel["kernel"] == "attend_decode" and "per_key" in kernel
        ]
        per_key = {cache: count for each in decode for cache, count in each.items()}
        plain = per_key.pop("torch.bfloat16")
        assert per_key and max(per_key.values()) <= EIGHT_BITS * plain


@pytest.mark.limit(360)
def test_nothing_is_compiled_again_while_serving(quick: dict[str, Kernels]) -> None:
    """No size of a step, no address of its vectors, and no width of the tables makes Triton compile a kernel again."""
    forms = {(kernel["kernel"], kernel["hash"]) for kernel in quick["serving"]}
    of_each = Counter(name for name, _ in forms)
    assert of_each.pop("_rms_norm") == 2  # compiled twice: with and without the addition of the residual
    assert set(of_each.values()) == {1}
