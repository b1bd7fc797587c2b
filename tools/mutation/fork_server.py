"""Imports the given libraries, then forks a run of the tests for each line of its input. None of our packages is
imported before the fork, so that each run reads the files as they are then.

A line is JSON. `first`: test files with this word in their names come first, quick tests before slow ones. `usual_s`:
the seconds that each test takes without a mutant, {} for the run that measures them. The answer has the outcome, the
test in which the run ended, and the seconds of each test that came to its end."""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timed out"
HYPOTHESIS_IS_IMPORTED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
NOT_NEEDED = ("-p", "no:cacheprovider", "-p", "no:schemathesis")  # importing schemathesis takes longer than most runs
PR_SET_CHILD_SUBREAPER = 36
OK = 0
# A test may take `limit_s` seconds of CPU time plus FACTOR times its CPU time without a mutant. Other work on the
# machine makes the wall clock run longer than the CPU time, so the limit of wall time is WALL times the limit of CPU
# time.
FACTOR, WALL = 5.0, 3.0
FIRST_RUN_S = 100.0  # seconds assumed for a test whose usual time is not known
MEMORY_BYTES = 8 << 30  # stops a loop that never ends and collects values


def main() -> None:
    log, limit_s, libraries, *tests = sys.argv[1:]
    for library in libraries.split():
        importlib.import_module(library)
    if "hypothesis" in sys.modules:
        _settle_hypothesis()
    # Children whose parent was killed by a test become children of this process, and are ended with the run.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()  # pytest collects garbage twice after each run; frozen objects are skipped
    for line in sys.stdin:
        asked = json.loads(line)
        answer = run(log, tests, asked["first"], RunLimits(float(limit_s), asked["usual_s"]))
        print(json.dumps(answer), flush=True)


def _settle_hypothesis() -> None:
    """Makes hypothesis try the same examples for each mutant. It neither stores nor shrinks examples."""
    from hypothesis import Phase, settings

    phases = [Phase.explicit, Phase.generate]
    settings.register_profile(
        "mutants", max_examples=120, derandomize=True, database=None, deadline=None, phases=phases
    )
    settings.load_profile("mutants")


@dataclass(frozen=True, slots=True)
class RunLimits:
    limit_s: float
    usual_s: dict[str, float]  # seconds of each test without a mutant

    def set(self, test: str) -> None:
        """Sets the limits of a test. The kernel ends this process when a limit is exceeded."""
        cpu_s = self.limit_s + FACTOR * self.usual_s.get(test, FIRST_RUN_S)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, WALL * cpu_s)


def run(log: str, tests: list[str], first: str, limits: RunLimits) -> dict[str, Any]:
    times = Path(log).with_suffix(".times")
    times.write_text("")
    child = os.fork()
    if child == 0:
        _run_tests(log, tests, times, first, limits)
    _, raw = os.waitpid(child, 0)
    status = os.waitstatus_to_exitcode(raw)
    _end_descendants()
    lines = [json.loads(line) for line in times.read_text().splitlines()]
    outcome = {OK: SURVIVED, -signal.SIGALRM: TIMED_OUT, -signal.SIGPROF: TIMED_OUT}.get(status, KILLED)
    last = lines[-1][0] if lines and status != OK else ""
    times_s = {test: seconds for test, seconds in lines if seconds is not None}
    return {"outcome": outcome, "test": last, "times_s": times_s}


def _run_tests(log: str, tests: list[str], times: Path, first: str, limits: RunLimits) -> None:
    os.setsid()
    to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(to, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # nohup, and a shell for its background jobs, make processes ignore these signals. Tests need the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    import pytest

    status = 3
    try:
        limits.set("collection")
        options = ["-x", "-q", *NOT_NEEDED, *HYPOTHESIS_IS_IMPORTED]
        with times.open("w", buffering=1) as file:
            status = int(pytest.main([*options, *tests], plugins=[_Order(first, limits.usual_s), _Clock(file, limits)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _Order:
    """Sorts tests: tests likely to notice the mutant first, then the quickest. Tests of a file stay together, because
    they share fixtures.
    """

    def __init__(self, first: str, usual: dict[str, float]) -> None:
        self._first = first
        self._usual = usual

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        of_files: dict[Path, float] = defaultdict(float)
        for item in items:
            of_files[item.path] += self._usual.get(item.nodeid, 0.0)

        def rank(item: Any) -> tuple[bool, float, str, float]:
            likely = bool(self._first) and self._first in item.path.stem
            return not likely, of_files[item.path], str(item.path), self._usual.get(item.nodeid, 0.0)

        if self._usual:
            items.sort(key=rank)


class _Clock:
    """Writes two lines for each test: one when the test begins, and one with its seconds."""

    def __init__(self, file: TextIO, limits: RunLimits) -> None:
        self._file = file
        self._limits = limits
        self._began = 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._limits.set(nodeid)
        self._began = time.monotonic()
        print(json.dumps([nodeid, None]), file=self._file)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._limits.set("what comes between tests")
        print(json.dumps([nodeid, time.monotonic() - self._began]), file=self._file)


def _end_descendants() -> None:
    """Ends all descendants, even processes with sessions of their own: when a parent dies, its children become children
    of this process.
    """
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


if __name__ == "__main__":
    main()
