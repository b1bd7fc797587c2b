"""The cases of a stage: each of them once, an error costs one case, and comparisons notice what they should."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from gpu_check import stages
from gpu_check.comparing import close, equal, within, worst
from gpu_check.findings import Case, Context, FailedCase, Finding, Journal, Known, Measured, Request
from gpu_check.plans import PLANS
from gpu_check.stages import function_of, run_cases

CPU = torch.device("cpu")


def context(folder: Path, only: str = "") -> Context:
    return Context(CPU, Request("m:f", str(folder / "journal"), only=only))


def case(name: str, outcome: Measured | Exception, ran: list[str]) -> Case:
    def run() -> Iterable[Measured]:
        ran.append(name)
        if isinstance(outcome, Exception):
            raise outcome
        yield outcome

    return Case("T", {"case": name}, run)


def cases(ran: list[str]) -> list[Case]:
    broken = RuntimeError("out of resources\nand more")
    return [case("a", Measured({"µs": "3"}), ran), case("b", broken, ran), case("c", Measured(failure="wrong"), ran)]


def test_a_case_that_raises_is_a_finding_and_the_next_one_is_tried(tmp_path: Path):
    assert run_cases(cases([]), context(tmp_path))
    content = Journal(tmp_path / "journal").read()
    assert [finding.failure for finding in content.findings] == ["", "RuntimeError: out of resources", "wrong"]
    assert content.findings[0].cells == {"case": "a", "µs": "3"}
    assert content.failed == ["b", "c"] and not content.broken and not content.unended


def test_after_a_case_that_broke_the_gpu_no_other_case_runs_until_a_new_process_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stages, "is_broken", lambda device: True)
    ran: list[str] = []
    assert not run_cases(cases(ran), context(tmp_path))
    assert ran == ["a", "b"] and Journal(tmp_path / "journal").read().broken == ["b"]
    assert run_cases(cases(ran), context(tmp_path))
    assert ran == ["a", "b", "c"]


def test_a_case_can_be_run_alone(tmp_path: Path):
    ran: list[str] = []
    run_cases(cases(ran), context(tmp_path, only="c"))
    assert ran == ["c"]


def test_a_healthy_device_is_not_broken():
    assert not stages.is_broken(CPU)


def test_a_request_survives_its_file(tmp_path: Path):
    known = Known({"x": 1.5}, (FailedCase("s", "m:f:1", "case"),), "out")
    request = Request("m:f", "journal", known, "case")
    request.write(tmp_path / "request")
    assert Request.read(tmp_path / "request") == request


def test_a_journal_whose_writer_was_killed_is_read_to_its_last_whole_line(tmp_path: Path):
    journal = Journal(tmp_path / "journal")
    assert journal.read().findings == []
    first = Finding("T", {"µs": "3"}, {"f": 0.5}, "no")
    journal.begin("a", "T", {"case": "a"})
    journal.add("a", first)
    with (tmp_path / "journal").open("a") as out:
        out.write('{"end": "a", "bro')
    content = journal.read()
    assert content.findings == [first] and content.unended == "a"


def test_every_stage_of_every_plan_has_a_function():
    for function in {stage.function for plan in PLANS.values() for stage in plan}:
        assert callable(function_of(function))


def test_a_comparison_notices_a_factor_and_a_nan():
    expected = torch.randn(8, 8).half()
    assert not close(expected, expected, torch.float16).failure
    assert close(expected * 5, expected, torch.float16).failure
    assert close(expected.clone().fill_(float("nan")), expected, torch.float16).failure
    nearly = expected.clone()
    nearly[0, 0] += 1e-3
    assert equal(nearly, expected).failure and not equal(expected, expected).failure
    assert within(nearly, expected, torch.full((8, 8), 1e-4)).failure
    assert worst(Measured(), Measured(failure="x"), Measured(failure="y")).failure == "x"


def test_a_comparison_of_other_shapes_is_a_bug():
    with pytest.raises(AssertionError, match="is expected"):
        close(torch.zeros(2), torch.zeros(3), torch.float16)
