"""pytest's part of the GPU check: a journal of the tests that are done, so that another call goes on behind them.

Tests run in the workers of pytest-xdist. A worker ends when a test outlasts its limit (`@pytest.mark.limit(60)`) or
breaks the GPU's context, which then refuses all work; xdist reports the test as failed and goes on with a new worker.
"""

import faulthandler
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 60  # for a test without a mark
DONE, LATER = "done in an earlier call", "no time left in this call"

Entry = dict[str, Any]


def read(journal: Path) -> dict[str, Entry]:
    """The last entry of each test. A last line that was cut off, because its writer was killed, is left out."""
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    entries: list[Entry] = [json.loads(line) for line in lines if line.endswith("\n")]
    return {entry["test"]: entry for entry in entries}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal")
    parser.addoption("--until", type=float, help="no test begins that may take longer: seconds since 1970")
    parser.addoption("--patience", type=float, default=1, help="what all limits of tests are multiplied by")


def pytest_configure(config: pytest.Config) -> None:
    journal = Path(config.getoption("journal"))
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(
        JournaledProcess(journal, config.getoption("until")) if is_worker else JournalWriter(journal)
    )


class JournaledProcess:
    def __init__(self, journal: Path, until_s: float) -> None:
        self._done = {test for test, entry in read(journal).items() if entry["outcome"] != LATER}
        self._until_s = until_s
        self._failed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        faulthandler.dump_traceback_later(limit_s(item), exit=True, file=sys.__stderr__ or sys.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.nodeid in self._done:
            pytest.skip(DONE)
        if time.time() + limit_s(item) > self._until_s:
            pytest.skip(LATER)

    @pytest.hookimpl(trylast=True)  # the report has been sent before
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed
        if self._failed and report.when == "teardown" and is_broken():
            os._exit(1)  # with a broken context, torch's own end may hang


class JournalWriter:
    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._reports: dict[str, list[pytest.TestReport]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reports = self._reports[report.nodeid]
        reports.append(report)
        # The report of a worker's end has neither name, and may come after the others.
        if report.when not in ("setup", "call") and (entry := entry_of(reports))["reason"] != DONE:
            self._write(entry)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failed test, whichever exit status pytest has for it."""
        if report.failed:
            text = report.longreprtext
            entry = {"test": report.nodeid, "outcome": "failed", "reason": text.splitlines()[-1], "s": 0.0, "log": text}
            self._write(entry | {"lines": []})

    def _write(self, entry: Entry) -> None:
        with self._journal.open("a") as out:
            out.write(json.dumps(entry) + "\n")


def limit_s(item: pytest.Item) -> float:
    mark = item.get_closest_marker("limit")
    patience: float = item.config.getoption("patience")
    return patience * (float(mark.args[0]) if mark else LIMIT_S)


def is_broken() -> bool:
    """Whether the GPU's context refuses all further work, as it does after an illegal access. A lack of memory, or a
    kernel that cannot be launched, does not break it."""
    torch: Any = sys.modules.get("torch")  # a process without it has no context
    if torch is None or not torch.cuda.is_available():
        return False
    try:
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def entry_of(reports: list[pytest.TestReport]) -> Entry:
    """One line for the reports of a test's set-up, call and end, and of its worker's end."""
    said = next((report for report in reports if report.failed), None)
    said = said or next((report for report in reports if report.skipped), reports[0])
    reason = ""
    if said.failed:
        lines = said.longreprtext.splitlines() or ["failed"]
        reason = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1])
        reason += "; it broke the GPU" * (len(reports) > 3)
    elif said.skipped and isinstance(said.longrepr, tuple):
        reason = said.longrepr[2].removeprefix("Skipped: ")
    found: dict[str, Any] = {
        "test": said.nodeid,
        "outcome": LATER if reason == LATER else said.outcome,
        "reason": reason,
    }
    found["s"] = round(sum(report.duration for report in reports), 1)
    output = max((report.capstdout for report in reports), key=len)
    found["log"] = f"{said.longreprtext[-4000:]}\n{output[-4000:]}" if said.failed else ""
    return found | {"lines": [line for report in reports if report.when == "call" for line in report.user_properties]}
