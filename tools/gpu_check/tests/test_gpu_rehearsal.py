"""Every stage of the three plans runs without a GPU, with small sizes: what it measures there says nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from gpu_check.findings import Context, FailedCase, Journal, Known, Request
from gpu_check.matrices import TestLoop as TableLoop
from gpu_check.plans import PARTS, PLANS, Stage
from gpu_check.running import launcher
from gpu_check.stages import function_of, run_cases

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu-check runs in earnest")
CPU = torch.device("cpu")
STAGES = {stage.function: stage for plan in PLANS.values() for stage in plan}
IN_THIS_PROCESS = [function for function in STAGES if not function.startswith("matrices")]
FIGURES = {"memory_bytes_per_s": 1e10, "matrix_flops_per_s": 1e11}


@pytest.fixture(autouse=True)
def children_import_what_we_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def rehearse(function: str, journal: Path, known: Known | None = None) -> Journal:
    request = Request(function, str(journal), known or Known(FIGURES))
    with torch.inference_mode():
        assert run_cases(function_of(function)(Context(CPU, request)), Context(CPU, request))
    return Journal(journal)


@pytest.mark.parametrize("function", IN_THIS_PROCESS)
def test_a_stage_rehearses(function: str, tmp_path: Path):
    content = rehearse(function, tmp_path / "journal").read()
    assert content.findings and not [finding for finding in content.findings if finding.failure]


def test_the_tuners_table_is_put_among_the_results(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    rehearse("tune_tiles:tune_all", tmp_path / "journal", Known(FIGURES, out=str(out)))
    assert [path.name for path in out.iterdir()] == ["rehearsed.json"]


def test_the_table_of_kernel_tests_is_run_test_by_test(tmp_path: Path):
    stage = Stage("matrices", "matrices:run_part:0:2", 100)
    process = launcher(Known(), interpret=True)(stage, "", tmp_path / "journal", tmp_path / "log", {})
    assert process.wait(200) == 0, (tmp_path / "log").read_text()
    findings = Journal(tmp_path / "journal").read().findings
    assert 2 * len(findings) >= PARTS and {finding.cells["outcome"] for finding in findings} == {"passed"}
    assert all(re.match(r"test_kernels.py::test_\S+\[.*triton", finding.cells["test"]) for finding in findings)


@pytest.mark.parametrize(("part", "count"), [(0, 1), (1, 1), (2, 0), (7, 0)])
def test_a_part_of_the_table_may_have_no_tests(part: int, count: int, tmp_path: Path):
    context = Context(CPU, Request("", str(tmp_path / "journal"), Known()))
    items = [SimpleNamespace(nodeid=f"test_kernels.py::test_{i}") for i in range(2)]
    session = cast(pytest.Session, SimpleNamespace(items=items))
    assert len(list(TableLoop(context, part, 8)._cases(session))) == count


def test_what_the_sanitizer_finds_is_the_first_failed_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        '#!/bin/sh\necho "========= Invalid __global__ read of size 4 bytes"\necho "$@" >"$SEEN"\nexit 9\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    failed = (FailedCase("smoke", "smoke:compare_all", "embed"), FailedCase("smoke", "smoke:compare_all", "silu_mul"))
    content = rehearse("sanitizer:examine", tmp_path / "journal", Known(failed=failed)).read()
    (finding,) = content.findings
    assert finding.cells["case"] == "smoke: embed" and finding.failure == "Invalid __global__ read of size 4 bytes"
    assert "-m gpu_check.stages" in (tmp_path / "seen").read_text()


def test_the_command_says_which_stages_a_plan_has():
    command = [sys.executable, "-m", "gpu_check.check", "--plan", "b", "--only", "smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 2 and "plan b has no stage smoke; its stages are environment, " in done.stderr
