"""Stages run in their order, and a stage that hangs or breaks the GPU loses only its own findings."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_check import check
from gpu_check.check import RunningStage, rounds
from gpu_check.comparing import close, equal, findings
from gpu_check.findings import Context, Finding
from gpu_check.stages import STAGES, Stage, function_of

WRITE = """
import sys, time
from pathlib import Path
from gpu_check.findings import Finding, append
append(Path(sys.argv[1]), Finding("T", {"a": "1"}))
"""

# Environment for children, so that they can import the same modules.
HERE = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run(tmp_path: Path, code: str, limit_s: float = 60) -> RunningStage:
    found, log = tmp_path / "found", tmp_path / "log"
    command = [sys.executable, "-c", WRITE + code, str(found)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=HERE, start_new_session=True)
    return RunningStage(Stage("s", "m:f", limit_s), process, time.monotonic(), limit_s, found, log)


def wait_for_findings(running: RunningStage) -> None:
    while not running.findings.exists() or not running.findings.read_text().endswith("\n"):
        time.sleep(0.02)


def test_what_takes_times_runs_alone_and_the_rest_side_by_side():
    alone = [Stage("a", "", 1), Stage("b", "", 1)]
    beside = [Stage(name, "", 1, beside_others=True) for name in "cde"]
    names = [[s.name for s in together] for together in rounds([alone[0], *beside, alone[1]], beside=2)]
    assert names == [["a"], ["c", "d"], ["e"], ["b"]]


def test_every_stage_has_a_function_and_a_name_of_its_own():
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    assert all(callable(function_of(stage)) for stage in STAGES)


def test_a_stage_that_hangs_is_stopped_and_what_it_found_is_kept(tmp_path: Path):
    running = run(tmp_path, "time.sleep(600)")
    wait_for_findings(running)
    assert running.result() is None
    running.limit_s = 0
    result = running.result()
    assert result is not None and "not done after" in result.failure
    assert result.findings == [Finding("T", {"a": "1"})]
    assert running.process.returncode is not None


def test_a_stage_that_breaks_gives_its_last_words(tmp_path: Path):
    running = run(tmp_path, "sys.exit('an illegal memory access')")
    running.process.wait(60)
    result = running.result()
    assert result is not None and result.failure == "ended with status 1: an illegal memory access"
    assert result.log == "an illegal memory access"
    assert result.findings == [Finding("T", {"a": "1"})]


def test_without_a_gpu_the_check_rehearses_and_writes_where_it_is_told(tmp_path: Path):
    environment = HERE | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", check.__name__, "--only", "environment", "--out", str(tmp_path / "result")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this is a rehearsal" in done.stdout
    assert "not run: no GPU" in (tmp_path / "result.md").read_text()


def test_a_comparison_notices_a_factor_and_a_nan():
    expected = torch.randn(8, 8).half()
    assert close(expected, expected, torch.float16).share == 0
    assert close(expected * 5, expected, torch.float16).share > 1
    assert close(expected.clone().fill_(float("nan")), expected, torch.float16).share == float("inf")
    nearly = expected.clone()
    nearly[0, 0] += 1e-3
    assert equal(nearly, expected).share > 1


def test_a_case_that_raises_is_a_finding_and_the_next_one_is_tried():
    def fail():
        raise RuntimeError("out of resources\nand more")

    x = torch.zeros(2)
    found = list(findings("T", iter([({"case": "1"}, fail), ({"case": "2"}, lambda: equal(x, x))])))
    assert [finding.failure for finding in found] == ["RuntimeError: out of resources", ""]


def test_a_comparison_of_other_shapes_is_a_bug():
    with pytest.raises(AssertionError, match="is expected"):
        close(torch.zeros(2), torch.zeros(3), torch.float16)


def test_a_context_knows_its_gpu():
    assert Context(torch.device("cuda"), {}).on_gpu and not Context(torch.device("cpu"), {}).on_gpu
