"""The parts of `make test`, and what it prints of them."""

from all_tests import PartRun, default_markers, parts, table, times

REPORT = """<testsuites><testsuite><testcase classname="a.test_b" name="test_slow" time="3.5"/>
<testcase classname="a.test_b" name="test_fast" time="0.25"><failure/></testcase></testsuite></testsuites>"""


def test_each_test_of_the_launcher_and_of_whole_servers_is_in_one_part() -> None:
    servers, alone = (part.arguments for part in parts(["router"], "not slow")[1:])
    assert servers[-1] == "not slow and not alone" and alone[-1] == "not slow and alone"
    assert "--numprocesses" in servers and "--numprocesses" not in alone
    assert {"launcher", "integration-tests"} <= {*alone} & {*servers}
    assert "not slow" in default_markers() and "alone" not in default_markers()


def test_the_table_has_each_parts_seconds_and_the_slowest_tests_of_all_parts() -> None:
    first, second = parts(["router"], "not slow")[:2]
    tests = [(i / 10, f"test_{i}") for i in range(30)]
    runs = [PartRun(first, 12.4, 20.2, [*times(REPORT)]), PartRun(second, 2.0, 3.0, tests)]
    lines = table(runs).splitlines()
    assert lines[0].strip() == "12 s, 20 s of processors: packages, 2 tests" and "launcher, 30 tests" in lines[1]
    assert [line.split()[0] for line in lines[3:]] == ["3.5", *(f"{i / 10}" for i in range(29, 10, -1))]
