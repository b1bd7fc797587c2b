"""Steps as they are launched on a GPU: the host never waits for the GPU, and no kernel is compiled after the warm-up.

There is no GPU: `fake_gpu` says what this shows. `make gpu-check` shows the same on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

SCRIPT = Path(__file__).with_name("steps_on_fake_gpu.py")


@pytest.fixture(scope="module")
def served() -> list[dict[str, Any]]:
    """What was seen of rank 0 of two with a Llama and graphs, of a lone shard with a GPT-2, weights and keys in 8
    bits and no graphs, and of a mixture of experts with a window."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=3000, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == 3 and all(seen["launched"] > 10 for seen in found)
    return found


def test_the_host_launches_a_step_without_waiting_for_the_gpu(served: list[dict[str, Any]]) -> None:
    assert [seen["waits"][""] for seen in served] == [[], [], []]


@pytest.mark.parametrize(
    ("option", "line"), [("watermark", "sampler.py: copied.wait()"), ("grammar", "rows.py: done.wait()")]
)
def test_an_option_waits_for_the_step_before_while_the_gpu_computes_this_one(
    served: list[dict[str, Any]], option: str, line: str
) -> None:
    for seen in served:
        assert seen["waits"][option] == [f"a moment, with kernels launched behind it, is awaited ({line})"]


def test_no_kernel_is_compiled_after_the_warm_up(served: list[dict[str, Any]]) -> None:
    assert [seen["compiled"] for seen in served] == [[], [], []]
