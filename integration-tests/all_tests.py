"""Runs all tests in parts, for `make test`, and prints the seconds of each part and the slowest tests of all parts.

The first part has the packages named on the command line, in one process more than there are cores: some tests wait.
Tests that start whole servers, and those of the launcher, wait for other processes for a part of their time, and run in
three processes. All these, and the shards of their servers, compute with one thread each, because a second one would
spin while another process needs its core. Tests marked `alone` keep the machine busy, look at all of it, or fail after
seconds of silence: such tests run one after the other at the end. A part that fails is the last one. conftest.py beside
this folder says in which order files begin."""

import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
NUM_SLOWEST = 20
# What pytest says if no test is selected.
NO_TESTS = 5


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)  # beside that of this process


@dataclass(frozen=True, slots=True)
class PartRun:
    part: Part
    seconds: float
    processor_seconds: float  # what pytest and all processes that it has waited for have used
    tests: Sequence[tuple[float, str]]  # seconds with setup and teardown, and name


def parts(packages: Sequence[str], default: str) -> list[Part]:
    """`default`: which tests run unless a run says otherwise, as an expression of markers."""
    # Files keep their order, because the number of tests of a file says nothing about its seconds.
    by_file = ("--dist", "loadfile", "--no-loadscope-reorder")
    processes = str(min(4, (os.cpu_count() or 1) + 1))
    one_thread = {"OMP_NUM_THREADS": "1"}
    servers = ("--numprocesses", "3", *by_file, "integration-tests", "launcher")
    return [
        Part("packages", ("--numprocesses", processes, *by_file, *packages), one_thread),
        Part("whole servers and launcher", (*servers, "-m", f"{default} and not alone"), one_thread),
        Part("alone", ("launcher", "integration-tests", "-m", f"{default} and alone")),
    ]


def default_markers() -> str:
    """The expression of pyproject.toml, which `-m` on a command line replaces."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    words = shlex.split(options["addopts"])
    return words[words.index("-m") + 1]


def run(part: Part, folder: Path) -> tuple[int, PartRun]:
    """Runs the part; its exit status, and what it took."""
    report, started_s, before_s = folder / f"{part.name}.xml", time.monotonic(), processor_seconds()
    command = [str(Path(sys.executable).with_name("pytest")), f"--junitxml={report}", *part.arguments]
    status = subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, **part.environment}).returncode
    tests = list(times(report.read_text())) if report.exists() else []
    return status, PartRun(part, time.monotonic() - started_s, processor_seconds() - before_s, tests)


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def times(report: str) -> Iterator[tuple[float, str]]:
    """Seconds and name of each test in a report of pytest's --junitxml."""
    for case in ElementTree.fromstring(report).iter("testcase"):
        yield float(case.get("time", "0")), f"{case.get('classname')}::{case.get('name')}"


def table(runs: Sequence[PartRun]) -> str:
    lines = [
        f"{run.seconds:7.0f} s, {run.processor_seconds:.0f} s of processors: {run.part.name}, {len(run.tests)} tests"
        for run in runs
    ]
    slowest = sorted((test for each in runs for test in each.tests), reverse=True)[:NUM_SLOWEST]
    lines += [f"the {len(slowest)} slowest tests:", *(f"{seconds:7.1f} s  {name}" for seconds, name in slowest)]
    return "\n".join(lines)


def main() -> int:
    runs, status = [], 0
    with tempfile.TemporaryDirectory(prefix="tgi-tests-") as folder:
        for part in parts(sys.argv[1:], default_markers()):
            print(f"== {part.name}", flush=True)
            status, done = run(part, Path(folder))
            runs.append(done)
            if status not in (0, NO_TESTS):
                break
    print(table(runs))
    return 0 if status == NO_TESTS else status


if __name__ == "__main__":
    raise SystemExit(main())
