"""The results file counts a target as met only if a GPU has shown it, and names each stage that is missing."""

import json
from pathlib import Path

import pytest
from gpu_check.findings import Finding
from gpu_check.results import TARGETS, CheckReport, StageResult

from text_generation_benchmark.output import table

AT_LEAST, AT_MOST = TARGETS[0], TARGETS[-1]


def report(on_gpu: bool = True, **figures: float) -> CheckReport:
    named = {name.replace("_", " "): value for name, value in figures.items()}
    stages = [StageResult("server", 3.0, [Finding("Server", {"streams": "1"}, named)])]
    return CheckReport("a", "Some GPU", on_gpu, "today", stages, ["roofline"])


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [({"decode_at_1": 0.81}, "met: 81.0%"), ({"decode_at_1": 0.79}, "not met: 79.0%"), ({}, "not run")],
)
def test_a_target_is_met_by_a_figure_that_reaches_it_and_by_nothing_else(figures, verdict):
    said = dict(report(**figures).verdicts())
    assert said[AT_LEAST].startswith(verdict)


def test_a_share_that_should_be_small_is_met_from_below():
    assert dict(report(outside_at_64=0.02).verdicts())[AT_MOST] == "met: 2.0%"
    assert dict(report(outside_at_64=0.04).verdicts())[AT_MOST] == "not met: 4.0%"


def test_a_rehearsal_meets_no_target_whatever_it_measured():
    rehearsal = report(on_gpu=False, decode_at_1=0.99, outside_at_64=0.0)
    assert {verdict for _, verdict in rehearsal.verdicts()} == {"not run: no GPU"}
    assert "rehearsal" in rehearsal.as_markdown()


def test_both_files_name_the_stages_that_have_not_run(tmp_path: Path):
    report(decode_at_1=0.9).write(tmp_path / "new" / "gpu-1.5")
    content = json.loads((tmp_path / "new" / "gpu-1.5.json").read_text())
    assert content["not_run"] == ["roofline"] and content["figures"] == {"decode at 1": 0.9}
    assert next(target["verdict"] for target in content["targets"]) == "met: 90.0%"
    assert "| roofline | not run yet |" in (tmp_path / "new" / "gpu-1.5.md").read_text()


def test_a_stage_passes_only_if_it_ended_in_order_and_nothing_in_it_failed():
    good, bad = Finding("T", {"a": "1"}), Finding("T", {"a": "2"}, failure="wrong | by far")
    assert StageResult("s", 1, [good]).passed
    assert StageResult("s", 1, [good, bad]).verdict == "failed: 1 of 2"
    assert StageResult("s", 1, [good], "not done after 9 s").verdict == "failed: not done after 9 s"
    text = CheckReport("a", "GPU", True, "today", [StageResult("s", 1, [good, bad], log="its end")], []).as_markdown()
    assert "## Log of s\n\n````text\nits end\n" in text
    assert "| 1 |  |\n| 2 | wrong / by far |" in text


def test_a_table_has_a_rule_as_wide_as_its_head():
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_a_plan_without_the_server_measures_no_target():
    report = CheckReport("c", "GPU", True, "today", [StageResult("matrices 0", 1, [Finding("T", {"a": "1"})])], [])
    assert report.verdicts() == [] and report.passed and "target" not in report.as_markdown()


def test_a_plan_passes_only_with_all_targets_met_and_all_stages_run():
    met = {"decode at 1": 0.9, "decode at 64": 0.8, "prefill": 0.6, "outside at 64": 0.01}
    stage = StageResult("server again", 1, [Finding("T", {"a": "1"}, met)])
    assert CheckReport("b", "GPU", True, "today", [stage], []).passed
    assert not CheckReport("b", "GPU", True, "today", [stage], ["tune"]).passed
    slow = StageResult("server again", 1, [Finding("T", {"a": "1"}, met | {"prefill": 0.5})])
    assert not CheckReport("b", "GPU", True, "today", [slow], []).passed


def test_a_stage_that_found_nothing_has_not_passed():
    assert StageResult("s", 1, []).verdict == "failed: it found nothing"
