"""A test that fails, hangs, breaks the GPU or ends its process costs itself only; a later call goes on behind it."""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_check import __main__ as check
from gpu_check.plugin import LATER, read

TESTS = """
import os, time
import pytest
from gpu_check import plugin

pytestmark = pytest.mark.limit(10**5)

def test_passes(record_property):
    record_property("T", {"cells": {"a": "1"}, "figures": {"f": 0.5}})

def test_fails():
    print("what the server said")
    assert 1 == 2

def test_is_skipped():
    pytest.skip("no such GPU")

@pytest.mark.limit(0.1)
def test_hangs():
    time.sleep(10**5)

def test_breaks_the_gpu(monkeypatch):
    plugin.is_broken = lambda: True
    raise RuntimeError("illegal access")

def test_ends_its_process():
    os._exit(3)

def test_is_behind_them():
    pass
"""


@pytest.fixture(autouse=True)
def children_import_what_we_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def test_each_test_is_done_once_whatever_the_others_do(tmp_path: Path) -> None:
    tests, journal = tmp_path / "test_it.py", tmp_path / "journal"
    tests.write_text(TESTS)

    def outcomes(left_s: float, status: int) -> dict[str, str]:
        assert check.run([str(tests)], 1, ("test_", "not nothing"), journal, time.time() + left_s) == status
        return {test.rpartition("::")[2]: entry["outcome"] for test, entry in read(journal).items()}

    names = ("passes", "fails", "is_skipped", "hangs", "breaks_the_gpu", "ends_its_process", "is_behind_them")
    assert outcomes(10**5, 1) == {f"test_{name}": LATER for name in names if name != "hangs"} | {"test_hangs": "failed"}
    wanted = dict.fromkeys((f"test_{name}" for name in names), "failed")
    wanted |= {"test_passes": "passed", "test_is_skipped": "skipped", "test_is_behind_them": "passed"}
    assert outcomes(10**7, 1) == wanted
    entries = {test.rpartition("::")[2]: entry for test, entry in read(journal).items()}
    assert entries["test_passes"]["lines"] == [["T", {"cells": {"a": "1"}, "figures": {"f": 0.5}}]]
    assert entries["test_fails"]["reason"] == "assert 1 == 2" and "what the server said" in entries["test_fails"]["log"]
    assert entries["test_is_skipped"]["reason"] == "no such GPU"
    assert entries["test_breaks_the_gpu"]["reason"] == "RuntimeError: illegal access; it broke the GPU"
    assert "crashed" in entries["test_hangs"]["reason"] and "crashed" in entries["test_ends_its_process"]["reason"]
    before = journal.read_text()
    assert outcomes(10**7, 0) == wanted and journal.read_text() == before


def test_a_journal_whose_writer_was_killed_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text('{"test": "a", "outcome": "passed"}\n{"test": "b", "outc')
    assert list(read(tmp_path / "journal")) == ["a"] and read(tmp_path / "none") == {}


def test_tests_that_cannot_be_collected_fail_the_check(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import nothing_of_this_name")
    assert check.run([str(tmp_path)], 1, (), tmp_path / "journal", time.time() + 10**5) != check.LATE
    [entry] = read(tmp_path / "journal").values()
    assert entry["outcome"] == "failed" and "nothing_of_this_name" in entry["reason"]


def test_no_suite_begins_without_time(tmp_path: Path) -> None:
    assert check.run([str(tmp_path)], 1, (), tmp_path / "journal", time.time() - 60) == check.LATE


def rehearse(folder: Path, monkeypatch: pytest.MonkeyPatch, keyword: str) -> dict[str, Any]:
    """The results of a call of the check."""
    monkeypatch.setattr(check, "JOURNALS", folder / "journals")
    monkeypatch.setattr(check, "LIMIT_S", 10**5)
    monkeypatch.setenv("OUT", str(folder / "lent"))
    monkeypatch.setattr(sys, "argv", ["gpu_check", "-k", keyword])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert not ended.value.code
    out = folder / "lent"
    assert sorted(path.suffix for path in out.iterdir()) == [".json", ".jsonl", ".md"]
    content: dict[str, Any] = json.loads(next(out.glob("*.json")).read_text())
    assert not content["on_gpu"] and set(content["targets"].values()) == {"not run"}
    return content


def test_all_suites_run_and_meet_no_target_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suites, names = [], ("one", "two", "three")
    for name in names:
        tests = (f"chosen_{name}", f"left_{name}", f"chosen_of_another_{name}")
        (tmp_path / f"test_{name}.py").write_text("".join(f"def test_{test}(): pass\n" for test in tests))
        suites.append(([str(tmp_path / f"test_{name}.py")], 1, "not of_another" if name == "two" else ""))
    monkeypatch.setattr(check, "SUITES", suites)
    ran = {test["test"].rpartition("::test_")[2] for test in rehearse(tmp_path, monkeypatch, "chosen")["tests"]}
    assert ran == {*(f"chosen_{name}" for name in names), "chosen_of_another_one", "chosen_of_another_three"}


def test_the_suites_name_files_and_tests_that_are_there() -> None:
    for paths, _, _ in check.SUITES:
        assert all((check.ROOT / path.removeprefix("--ignore=")).exists() for path in paths)
    table = (check.ROOT / check.TABLE / "test_kernels.py").read_text()
    names = re.findall(r"[a-z]+(?:_[a-z]+)+", check.TABLE_KEYWORD)
    assert (names or check.GPU) and all(name in table for name in names)


@pytest.mark.slow
def test_a_rehearsal_runs_all_suites_and_meets_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = rehearse(tmp_path, monkeypatch, "embed_picks or prefill_attention or sanitizer")
    files = {test["test"].partition("::")[0].rpartition("/")[2] for test in content["tests"]}
    assert files == {"test_roofline.py", "test_kernels.py", "test_machine.py"}
