"""docs/models.md agrees with the server's tables of models. `make test-models` writes the page."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_results import (
    FAILED,
    FILES,
    KEPT,
    NOT_RUN,
    PAGE,
    ROOT,
    Recorder,
    Result,
    Results,
    read_results,
    write_results,
)
from model_types import FALLBACK, NATIVE, REFUSED, TGI, standing
from models_page import (
    cell,
    counted,
    forms_table,
    further_table,
    largest,
    native_table,
    published_table,
    subject,
    tgi_table,
)
from test_family_fields import FIELDS

STALE = "docs/models.md is not what the code says: run make test-models (ARGS=--collect-only writes it without tests)"
BLOOM, OPT = ("test_a::test_x", "bloom"), ("test_a::test_x", "opt")


@pytest.mark.parametrize("part", [tgi_table, further_table, native_table])
def test_the_page_lists_the_types_as_the_code_serves_them(part: Callable[[Results], str]) -> None:
    assert part(read_results()) in PAGE.read_text(), STALE


def test_the_page_has_the_lines_with_which_models_are_refused() -> None:
    assert forms_table() in PAGE.read_text(), STALE
    assert published_table() in PAGE.read_text(), STALE


def test_the_page_names_no_folder_of_a_machine() -> None:
    assert not re.search(r"/(tmp|root|home|work|Users)/", PAGE.read_text() + KEPT.read_text())


def test_results_are_about_the_fields_that_families_read() -> None:
    tests = "test_family_fields::test_a_changed_field_moves_the_logits_or_is_refused"
    found = {result.parameters for result in read_results() if result.test == tests}
    assert found == {f"{model_type}-{name}" for model_type, name in FIELDS}, STALE


def test_all_tests_marked_models_are_run() -> None:
    tests = [path for folder in ROOT.glob("[!.]*/") for path in folder.glob("**/test_*.py")]
    marked = {path for path in tests if "mark.models" in path.read_text()} - {Path(__file__)}
    assert len(marked) > 5 and marked <= set(FILES)


def test_the_models_of_text_generation_inference_are_native_or_computed_by_transformers_or_refused() -> None:
    kinds = {name: standing(raw).kind for name, raw in TGI.items()}
    assert len(kinds) == 39
    some = {"BLOOM": NATIVE, "Galactica": NATIVE, "Gemma 3": NATIVE, "DBRX": FALLBACK, "Mamba": REFUSED, "T5": REFUSED}
    assert kinds.items() >= some.items()


def report(key: tuple[str, str], outcome: Any, when: Any = "call", longrepr: Any = None) -> pytest.TestReport:
    nodeid = f"a/{key[0].replace('::', '.py::')}[{key[1]}]"
    return pytest.TestReport(
        nodeid, ("", 0, ""), {}, outcome, longrepr, when, user_properties=[("float32", 1.23456e-5)]
    )


def test_a_run_replaces_the_results_of_its_tests_and_leaves_the_others(tmp_path: Path) -> None:
    recorder, results = Recorder(), Results()
    for key in (BLOOM, OPT):
        recorder.pytest_runtest_logreport(report(key, "passed"))
    gone, waiting = ("test_a::test_gone", ""), ("test_a::test_x", "phi")
    results.merge("first", recorder.ended | {gone: {}}, {BLOOM, OPT, gone, waiting})
    assert len(list(results)) == 4

    recorder = Recorder()
    recorder.pytest_runtest_logreport(report(OPT, "failed"))
    results.merge("second", recorder.ended, {BLOOM, OPT, waiting})
    write_results(results, tmp_path / "results")
    read = read_results(tmp_path / "results")
    assert read == results and list(read) == [
        Result(*BLOOM, {"float32": 1.2e-5}), Result(*OPT, FAILED), Result(*waiting, NOT_RUN)
    ]  # fmt: skip
    assert {run: set(found) for run, found in read.runs.items()} == {"first": {BLOOM}, "second": {OPT}}


def test_a_test_that_fails_before_or_after_its_call_has_failed_and_a_skipped_one_has_a_reason() -> None:
    recorder = Recorder()
    recorder.pytest_runtest_logreport(report(BLOOM, "passed"))
    recorder.pytest_runtest_logreport(report(BLOOM, "failed", "teardown"))
    recorder.pytest_runtest_logreport(report(OPT, "skipped", "setup", ("file", 1, "Skipped: needs a GPU")))
    assert recorder.ended == {BLOOM: FAILED, OPT: "skipped: needs a GPU"}


def test_tests_that_have_passed_may_be_left_out() -> None:
    results = Results({"run": {BLOOM: {"float32": 0.5}, OPT: FAILED}}, {("test_a::test_x", "phi")})
    assert results.passed() == {BLOOM}


def test_what_did_not_pass_stands_in_the_table() -> None:
    passed, failed, skipped, waiting = (Result(*BLOOM, ended) for ended in ({"a": 0.5}, FAILED, "skipped: b", NOT_RUN))
    assert counted([passed, passed]) == "all 2 passed"
    assert counted([passed, failed, skipped, waiting]) == "1 of 4 passed: **1 failed, 1 skipped, 1 not run**"
    assert cell([passed, passed], "test_x", largest("a")) == "5.0e-01"
    assert cell([passed, waiting], "test_x", largest("a")) == "1 of 2 passed: **1 not run**"
    assert [cell([result], "test_x") for result in (failed, skipped, waiting)] == [
        "**failed**",
        "**skipped**",
        "**not run**",
    ]
    assert cell([passed], "test_y") == "–"


@pytest.mark.parametrize(
    ("test", "parameters", "about"),
    [
        ("test_families::test_x", "bloom, six heads-64", (NATIVE, "bloom")),
        ("test_families::test_x", "2-qwen3_moe, windows", (NATIVE, "qwen3_moe")),
        ("test_family_fields::test_x", "llama-rope_theta", (NATIVE, "llama")),
        ("test_family_fields::test_x", "gemma2-sliding_window", (NATIVE, "gemma2")),
        ("test_families_served::test_x", "gemma3_text-write_sentencepiece", (NATIVE, "gemma3_text")),
        ("test_fallback_models::test_x", "qwen3", (FALLBACK, "qwen3")),
        ("test_fallback_models::test_x", "dtype0-gpt_oss", (FALLBACK, "gpt_oss")),
        ("test_text_in_multimodal::test_x", "old-llava_next", (NATIVE, "llava_next")),
        ("test_llama::test_x", "17", (NATIVE, "llama")),
        ("test_families::test_x", "", (NATIVE, "")),
    ],
)
def test_a_result_is_about_the_model_type_in_its_parameters(test: str, parameters: str, about: tuple[str, str]) -> None:
    assert subject(test, parameters) == about
