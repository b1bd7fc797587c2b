"""The kernels' table of tests on the device: every kernel, type, cache and shape, against mathematics in float64.

The table is the repository's own, run by pytest as it is. Each test is a case: a test that breaks the GPU's context
ends the process, and the next process goes on behind it.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from gpu_check.findings import Case, Context, Measured
from gpu_check.stages import end_broken, run_cases

TABLE = "The table of kernel tests"
ROOT = Path(__file__).parents[2]
TESTS = "server/text_generation_server/kernels/tests"
# Tests of compiling for absent GPUs and of the tuner: a GPU adds nothing to them, and they take minutes.
LEFT_OUT = ("test_triton_compiles.py", "test_tune.py")
# A warning is not a wrong number. Nothing is captured, so that the log has what a driver prints before a process ends.
OPTIONS = ("-q", "-s", "--tb=short", "--color=no", "-p", "no:cacheprovider", "-o", "filterwarnings=default",
           "--disable-plugin-autoload", "--import-mode=importlib", f"--rootdir={ROOT}",
           f"--confcutdir={ROOT}")  # fmt: skip
# A few tests of the table, by pytest's -k: at least one for each part, since a stage that finds nothing has failed.
REHEARSED = "triton and (silu_mul_takes or embed_picks or norm_of_a_sum)"


def run_part(context: Context, part: str, parts: str) -> Iterator[Case]:
    """Every `parts`-th test of the Triton kernels, from number `part` on. Gives no cases: pytest runs the tests."""
    # pytest would take the SystemExit of the usual handler for a test's failure, and go on.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    loop = TestLoop(context, int(part), int(parts))
    keyword = "triton" if context.on_gpu else REHEARSED
    left_out = [f"--ignore={ROOT / TESTS / name}" for name in LEFT_OUT]
    status = pytest.main([*OPTIONS, "-k", keyword, *left_out, str(ROOT / TESTS)], plugins=[loop])
    if loop.broken:
        end_broken()
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(f"pytest could not run the table of tests: {status!r}")
    return iter(())


class TestLoop:
    """Runs the collected tests as cases, instead of pytest's own loop."""

    def __init__(self, context: Context, part: int, parts: int) -> None:
        self.broken = False
        self._context = context
        self._part = part
        self._parts = parts
        self._reports: list[pytest.TestReport] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:  # a file could not be collected, which pytest has printed
            sys.exit("pytest could not collect the table of tests")
        with torch.inference_mode(False):
            self.broken = not run_cases(self._cases(session), self._context)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def _cases(self, session: pytest.Session) -> Iterator[Case]:
        items = session.items[self._part :: self._parts]
        for item, following in zip(items, [*items[1:], None], strict=False):  # there may be no items

            def run(item: pytest.Item = item, following: pytest.Item | None = following) -> Iterable[Measured]:
                self._reports.clear()
                started_s = time.perf_counter()
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                yield measured(self._reports, time.perf_counter() - started_s)

            yield Case(TABLE, {"test": item.nodeid.removeprefix(f"{TESTS}/")}, run)


def measured(reports: list[pytest.TestReport], seconds: float) -> Measured:
    """One line for the reports of a test's set-up, call and end."""
    said = {"s": f"{seconds:.1f}"}
    for report in reports:
        if report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            return Measured(said | {"outcome": "failed"}, failure=lines[0][1:].strip() if lines else "failed")
        if report.skipped:
            why = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "skipped"
            return Measured(said | {"outcome": why})
    passed = any(report.when == "call" for report in reports)
    return Measured(said | {"outcome": "passed"}, failure="" if passed else "the test did not run")
