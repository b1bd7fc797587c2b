"""The parts of `make test`, how the processes of a part share its files, and what it prints of them."""

import re
from collections import Counter
from pathlib import Path

import pytest
from all_tests import LONG, NO_TESTS, ROOT, Part, PartRun, default_markers, files, parts, run, table, times, worst

REPORT = """<testsuites><testsuite><testcase classname="a.test_b" name="test_slow" time="3.5"/>
<testcase classname="a.test_b" name="test_fast" time="0.25"><failure/></testcase></testsuite></testsuites>"""
TESTS = """
import os, pytest

def note(what):
    with open({journal!r}, "a") as journal:
        journal.write(f"{{what}} {{os.getpid()}}\\n")

@pytest.fixture(scope="module", autouse=True)
def of_module():
    note("begin {name}")
    yield
    note("end {name}")

@pytest.mark.parametrize("number", range(3))
def test_it(number, of_session):
    note(f"{name} {{number}}")
    assert "{name}" != "c" or number != 1

@pytest.mark.other
def test_is_not_chosen():
    assert False
"""
CONFTEST = """
import os, pytest

@pytest.fixture(scope="session")
def of_session():
    yield
    with open({journal!r}, "a") as journal:
        journal.write(f"end session {{os.getpid()}}\\n")
"""


def test_each_test_of_the_launcher_and_of_whole_servers_is_in_one_part() -> None:
    servers, alone = parts(["router"], "not slow")[1:]
    assert servers.markers == "not slow and not alone" and alone.markers == "not slow and alone"
    assert servers.processes > 1 == alone.processes
    assert {"launcher", "integration-tests"} <= {*alone.folders} & {*servers.folders}
    assert "not slow" in default_markers() and "alone" not in default_markers()


def test_all_files_are_shared_out_and_the_long_ones_first() -> None:
    found = files(["server", "tools", "router", "benchmark", "integration-tests"])
    assert len(found) == len({*found}) and str(Path(__file__)) in found
    assert all(path.endswith(end) for path, end in zip(found, LONG, strict=False))
    assert all(Path(path).is_relative_to(ROOT) for path in found)


def test_the_readme_names_each_file_with_cases_that_make_test_leaves_out() -> None:
    readme = Path(__file__).with_name("README.md").read_text()
    table = readme.partition("## What only `make test-slow` runs\n")[2].partition("\n## ")[0]
    found = map(Path, files("benchmark clients common integration-tests launcher router server tools".split()))
    marked = {path.name for path in found if re.search(r"\bmark\.(slow|formats)\b", path.read_text())}
    assert len(marked) > 20 and {*re.findall(r"^\| `(\w+\.py)` \|", table, re.MULTILINE)} == marked


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with tests in three files, and what they write; and a file without tests to run."""
    journal = tmp_path / "journal"
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers = other\naddopts = -q -p no:cacheprovider -p no:schemathesis\n"
    )
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST.format(journal=str(journal)))
    for name in "abc":
        content = TESTS.format(journal=str(journal), name=name)
        (tmp_path / "tests" / f"test_{name}.py").write_text(content)
    (tmp_path / "tests" / "test_none_is_chosen.py").write_text(
        "import pytest\n\n@pytest.mark.other\ndef test_it(): pass\n"
    )
    return tmp_path, journal


def test_each_test_runs_once_in_one_of_the_processes_and_a_failure_is_told(
    shared: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    root, journal = shared
    status, done = run(Part("a part", ["tests"], 2, "not other"), root, root)
    assert status == 1 and "1 failed" in capfd.readouterr().out
    lines = [line.rsplit(" ", 1) for line in journal.read_text().splitlines()]
    of = {name: [(what, pid) for what, pid in lines if name in what.split()] for name in "abc"}
    for name, own in of.items():
        assert [what for what, _ in own] == [
            f"begin {name}",
            *(f"{name} {number}" for number in range(3)),
            f"end {name}",
        ]
        assert len({pid for _, pid in own}) == 1
    assert Counter(what for what, _ in lines)["end session"] == len({pid for _, pid in lines})
    assert len(done.tests) == 9


def test_a_part_without_tests_has_not_failed_and_one_with_a_killed_process_has() -> None:
    assert worst([NO_TESTS, NO_TESTS]) == NO_TESTS and worst([NO_TESTS, 0]) == 0
    assert worst([0, 1, NO_TESTS]) == 1 and worst([0, -11]) == -11


def test_the_table_has_each_parts_seconds_and_the_slowest_tests_of_all_parts() -> None:
    first, second = parts(["router"], "not slow")[:2]
    tests = [(i / 10, f"test_{i}") for i in range(50)]
    runs = [PartRun(first, 12.4, 20.2, [*times(REPORT)]), PartRun(second, 2.0, 3.0, tests)]
    lines = table(runs).splitlines()
    assert lines[0].strip() == "12 s, 20 s of processors: packages, 2 tests" and "launcher, 50 tests" in lines[1]
    slowest = sorted([3.5, *(i / 10 for i in range(50))], reverse=True)[:40]
    assert [line.split()[0] for line in lines[3:]] == list(map(str, slowest))
