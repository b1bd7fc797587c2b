"""A stage that hangs, breaks its GPU or dies costs one case, and a plan that is cut off leaves files that can be read.

The stages are stand-ins: each case of their processes does what the test says, and needs neither torch nor a GPU.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from gpu_check import check, running
from gpu_check.check import Check
from gpu_check.findings import Known, Request
from gpu_check.plans import LIMIT_S, PLANS, STOP_S, Stage, rounds, time_for
from gpu_check.results import StageResult
from gpu_check.running import Launch, RunningStage

PROCESS = """
import os, signal, sys, time
from pathlib import Path
from gpu_check.findings import Finding, Journal, Request
request = Request.read(Path(sys.argv[1]))
journal = Journal(Path(request.journal))
if not sys.argv[2:]:
    sys.exit("no driver")
for number, deed in enumerate(sys.argv[2:]):
    name = f"case {number}"
    if name in journal.read().begun or request.only not in ("", name):
        continue
    journal.begin(name, "T", {"a": name})
    if deed == "hang":
        time.sleep(600)
    if deed == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    failure = "" if deed == "pass" else "an illegal memory access"
    journal.add(name, Finding("T", {"a": name}, {name: 1.0}, failure))
    journal.end(name, broken=deed == "break")
    if deed == "break":
        print("launched by line 7, waiting:", os.environ.get("CUDA_LAUNCH_BLOCKING"), flush=True)
        sys.exit(70)
"""
HERE = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # for children that import what we can


def launch_of(deeds: Mapping[str, Sequence[str]]) -> Launch:
    """Stages whose cases do these deeds, by the stages' names."""

    def launch(stage: Stage, only: str, journal: Path, log: Path, variables: Mapping[str, str]) -> running.Process:
        request = journal.with_suffix(f"{journal.suffix}.json")
        Request(stage.function, str(journal), Known(), only).write(request)
        command = [sys.executable, "-c", PROCESS, str(request), *deeds[stage.name]]
        with log.open("ab") as out:
            return subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**HERE, **variables}, start_new_session=True
            )

    return launch


def run(folder: Path, *deeds: str, limit_s: float = 120, launch: Launch | None = None) -> StageResult:
    stage = RunningStage(Stage("s", "m:f", limit_s), folder, launch or launch_of({"s": deeds}), limit_s)
    while (result := stage.result()) is None:
        time.sleep(0.01)
    return result


def said(result: StageResult) -> list[tuple[str, str]]:
    return [(finding.cells["a"], finding.failure) for finding in result.findings]


def test_a_stage_goes_on_behind_a_case_that_breaks_the_gpu_and_behind_one_that_kills_its_process(tmp_path: Path):
    result = run(tmp_path, "pass", "break", "pass", "die", "fail", "pass")
    outcomes = ["", "an illegal memory access", "", "ended with status -9: ", "an illegal memory access", ""]
    for number, ((name, failure), outcome) in enumerate(zip(said(result), outcomes, strict=True)):
        assert name == f"case {number}" and failure.startswith(outcome) and bool(failure) == bool(outcome)
    assert result.failure == "" and result.verdict == "failed: 3 of 6"
    assert [case.case for case in result.failed_cases] == ["case 1", "case 3", "case 4"]


def test_the_first_case_that_broke_the_gpu_is_run_again_alone_with_launches_that_wait(tmp_path: Path):
    result = run(tmp_path, "pass", "break", "break")
    assert "launched by line 7, waiting: None" in result.log
    again = result.log.partition("case 1, again with CUDA_LAUNCH_BLOCKING=1:")[2]
    assert again.strip() == "launched by line 7, waiting: 1"
    assert [name for name, _ in said(result)] == ["case 0", "case 1", "case 2"]


def test_a_stage_that_hangs_is_stopped_at_its_limit_and_what_it_found_is_kept(tmp_path: Path):
    stage = RunningStage(Stage("s", "m:f", 600), tmp_path, launch_of({"s": ["pass", "hang", "pass"]}), 600)
    while (
        '"begin": "case 1"' not in (tmp_path / "s.journal").read_text() if (tmp_path / "s.journal").exists() else True
    ):
        time.sleep(0.02)
    assert stage.result() is None
    stage.limit_s = 0
    result = stage.result()
    assert result is not None and result.failure.startswith("not done after")
    assert said(result)[0] == ("case 0", "") and said(result)[1][1].startswith("not done after")
    assert stage.process.returncode is not None


def test_a_process_that_ends_before_its_first_case_is_not_started_again(tmp_path: Path):
    result = run(tmp_path)
    assert result.failure == "ended with status 1: no driver" and result.log == "no driver"


def test_a_stage_in_which_every_case_breaks_the_gpu_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running, "MOST_RESTARTS", 2)
    result = run(tmp_path, *["break"] * 9)
    assert len(result.findings) == 3 and result.failure.startswith("ended with status 70")


def check_of(stages: Sequence[Stage], out: Path, left_s: float = 300) -> Check:
    return Check("a", stages, time.monotonic() + left_s, out, beside=2)


def test_after_every_stage_the_files_are_whole_and_name_the_stages_that_have_not_run(tmp_path: Path):
    stages = [Stage(name, "m:f", 60) for name in ("first", "second", "third")]
    launch, out, seen = launch_of({"first": ["pass"], "second": ["fail"], "third": ["pass"]}), tmp_path / "out", []

    def look_first(*arguments: object) -> running.Process:
        (content,) = (json.loads(path.read_text()) for path in out.glob("*.json"))
        (text,) = (path.read_text() for path in out.glob("*.md"))
        seen.append(([stage["name"] for stage in content["stages"]], content["not_run"], "not run yet" in text))
        return launch(*arguments)  # type: ignore[arg-type]

    report = check_of(stages, out).run(lambda known: look_first)
    assert seen == [
        ([], ["first", "second", "third"], True),
        (["first"], ["second", "third"], True),
        (["first", "second"], ["third"], True),
    ]
    assert not report.waiting and not report.passed
    assert {path.suffix for path in out.iterdir()} == {".json", ".md"}


def test_a_plan_that_is_killed_leaves_whole_files_of_the_stages_that_were_done(tmp_path: Path):
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from pathlib import Path
from test_gpu_running import check_of, launch_of
from gpu_check.plans import Stage
from text_generation_benchmark.process import exit_on_sigterm
exit_on_sigterm()
stages = [Stage(name, "m:f", 600) for name in ("first", "second")]
check_of(stages, Path({str(tmp_path)!r})).run(lambda known: launch_of({{"first": ["pass"], "second": ["hang"]}}))
"""
    process = subprocess.Popen([sys.executable, "-c", code], env=HERE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"first: passed (0 s)\n"
    time.sleep(0.2)  # the files are written right after the line
    process.terminate()
    process.wait(60)
    process.stdout.close()
    (content,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert [stage["verdict"] for stage in content["stages"]] == ["passed"] and content["not_run"] == ["second"]


def test_stages_get_what_others_leave_and_no_stage_uses_time_that_is_reserved_behind_it():
    short, server = Stage("short", "", 60), Stage("server", "", 220, reserved_s=200)
    assert time_for(short, [server], 540) == 60
    assert time_for(short, [server], 250) == 250 - 200 - STOP_S
    assert time_for(short, [server], 200) < 0
    assert time_for(server, [], 216) == 216 - STOP_S


def test_a_stage_without_time_is_said_not_to_have_run(tmp_path: Path):
    stages = [Stage("first", "m:f", 60), Stage("last", "m:f", 60, reserved_s=50)]
    report = check_of(stages, tmp_path, left_s=60).run(lambda known: launch_of({"first": ["pass"], "last": ["pass"]}))
    assert [stage.verdict.partition(":")[0] for stage in report.stages] == ["failed", "passed"]
    assert "reserved for other stages" in report.stages[0].failure


def test_what_takes_times_runs_alone_and_the_rest_side_by_side():
    alone = [Stage("a", "", 1), Stage("b", "", 1)]
    beside = [Stage(name, "", 1, beside_others=True) for name in "cde"]
    names = [[s.name for s in together] for together in rounds([alone[0], *beside, alone[1]], beside=2)]
    assert names == [["a"], ["c", "d"], ["e"], ["b"]]


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_fits_its_call_and_its_stages_have_names_of_their_own(plan: str):
    stages = PLANS[plan]
    assert len({stage.name for stage in stages}) == len(stages)
    assert LIMIT_S <= 540 and sum(stage.reserved_s + STOP_S for stage in stages if stage.reserved_s) < LIMIT_S / 2 + 60
    assert all(stage.reserved_s <= stage.limit_s <= LIMIT_S for stage in stages)


def test_the_server_has_its_time_whatever_the_stages_before_it_take():
    stages = PLANS["a"]
    server = next(stage for stage in stages if stage.name == "server")
    left_s: float = LIMIT_S
    for i, stage in enumerate(stages[: stages.index(server)]):
        left_s -= max(0, time_for(stage, stages[i + 1 :], left_s)) + STOP_S
    assert time_for(server, stages[stages.index(server) + 1 :], left_s) >= 200


def test_the_results_folder_is_that_of_the_lender_if_it_names_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUT", str(tmp_path / "lent"))
    monkeypatch.setattr(check, "launcher", lambda known, interpret: launch_of({"first": ["pass"]}))
    assert check.check("c", [Stage("first", "m:f", 60)], None, time.monotonic() + 100)
    names = sorted(path.name for path in (tmp_path / "lent").iterdir())
    assert [name.rpartition("-")[2] for name in names] == ["c.json", "c.md"]
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") for name in names)
