"""Runs all tests in parts, for `make test`, and prints the seconds of each part and the slowest tests of all parts.

The first part has the packages named on the command line, in one process more than there are cores: some tests wait.
Tests that start whole servers, and those of the launcher, wait for other processes for a part of their time, and run in
three processes. All these, and the shards of their servers, compute with one thread each, because a second one would
spin while another process needs its core. Tests marked `alone` keep the machine busy, look at all of it, or fail after
seconds of silence: such tests run one after the other at the end. A part that fails is the last one. The processes of
a part share its files (shared_files.py). Files in LONG begin first, so that no process has a long file left when the
others have none. One process takes the files of SHARED first, because each process that has tests of these starts a
server for them."""

import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
NUM_SLOWEST = 40
SAY_EVERY_S = 15.0
# What pytest says if no test is selected.
NO_TESTS = 5
# Ends of paths, of files that take more than 10 s.
LONG = (
    "kernels/tests/test_triton_compiles.py",
    "gpu_check/tests/test_gpu_journal.py",
    "kernels/tests/test_kernels.py",
    "gpu_check/checks/test_server.py",
    "kernels/tests/test_sample.py",
    "tests/test_families.py",
    "tests/test_gguf_files.py",
    "tests/test_steps_on_a_gpu.py",
    "grammars/tests/test_schemas_followed.py",
    "grammars/tests/test_evil_grammars.py",
    "openapi/tests/test_cases.py",
    "demo_model/tests/test_demo_corpus.py",
    "replicas/tests/test_live.py",
    "integration-tests/test_chaos.py",
    "integration-tests/test_ctrl_c.py",
    "integration-tests/test_fronts.py",
    "integration-tests/test_attacks.py",
    "integration-tests/test_scheduling.py",
    "integration-tests/test_launch.py",
    "integration-tests/test_routes.py",
    "integration-tests/test_digest.py",
    "integration-tests/test_standby.py",
)
# Ends of paths, of files with tests of the server that conftest.py starts for all of them.
SHARED = tuple(
    f"integration-tests/test_{name}.py"
    for name in (
        *("scheduling", "page", "clients", "contract", "same_text", "launch", "sockets", "fallback_served"),
        *("agents_cached", "choosing_tokens", "demo_model", "documented_commands", "forms", "metrics_page"),
        "tgi_board",
    )
)


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    folders: Sequence[str]
    processes: int
    markers: str = ""  # an expression of markers, in the place of the default one
    threads: int | None = 1  # number of threads with which a process computes; None: one a core


@dataclass(frozen=True, slots=True)
class PartRun:
    part: Part
    seconds: float
    processor_seconds: float  # what pytest and all processes that it has waited for have used
    tests: Sequence[tuple[float, str]]  # seconds with setup and teardown, and name


def parts(packages: Sequence[str], default: str) -> list[Part]:
    """`default`: which tests run unless a run says otherwise, as an expression of markers."""
    processes = min(4, (os.cpu_count() or 1) + 1)
    whole = ("integration-tests", "launcher")
    return [
        Part("packages", packages, processes),
        Part("whole servers and launcher", whole, 3, f"{default} and not alone"),
        Part("alone", whole, 1, f"{default} and alone", threads=None),
    ]


def default_markers() -> str:
    """The expression of pyproject.toml, which `-m` on a command line replaces."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    words = shlex.split(options["addopts"])
    return words[words.index("-m") + 1]


def files(folders: Iterable[str], root: Path = ROOT) -> list[str]:
    """All files of tests below the folders, the long ones first."""
    found = [path for folder in folders for path in sorted((root / folder).rglob("test_*.py"))]
    return sorted(map(str, found), key=place)


def place(path: str) -> int:
    return next((number for number, end in enumerate(LONG) if path.endswith(end)), len(LONG))


def run(part: Part, folder: Path, root: Path = ROOT) -> tuple[int, PartRun]:
    """Runs the part; its exit status, and what it took."""
    started_s, before_s = time.monotonic(), processor_seconds()
    folder = Path(tempfile.mkdtemp("", "", folder))
    paths, found = folder / "paths", files(part.folders, root)
    shared = [path for path in found if path.endswith(SHARED)]
    # One process takes files from the beginning while these are shared ones. All others are taken from the end.
    paths.write_text("\n".join([*shared, *reversed([path for path in found if path not in shared])]))
    children = [_start(part, number, paths, root) for number in range(part.processes)]
    statuses = _wait(children, paths)
    tests = [test for report in sorted(folder.glob("*.xml")) for test in times(report.read_text())]
    return worst(statuses), PartRun(part, time.monotonic() - started_s, processor_seconds() - before_s, tests)


def _start(part: Part, number: int, paths: Path, root: Path) -> "subprocess.Popen[bytes]":
    folder = paths.parent
    own = [f"--junitxml={folder}/{number}.xml", f"--basetemp={folder}/gw{number}"]
    # The older form of reports is the one in which a test may record a property.
    own += ["-o", "junit_family=xunit1", "-o", "console_output_style=classic"]
    first = "" if number else " ".join(SHARED)
    command = [sys.executable, "-P", str(Path(__file__).with_name("shared_files.py")), str(paths), first]
    command += [*own, *part.folders]
    command += ["-m", part.markers] if part.markers else []
    # As in the processes of pytest-xdist.
    environment = {"PYTEST_XDIST_WORKER": f"gw{number}", "PYTEST_XDIST_WORKER_COUNT": str(part.processes)}
    if part.threads:
        environment["OMP_NUM_THREADS"] = str(part.threads)
    with (folder / f"{number}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=root, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment)


def _wait(children: "Sequence[subprocess.Popen[bytes]]", paths: Path) -> list[int]:
    """The exit statuses. Prints how many files are left, and in the end what the processes have printed."""
    while any(child.poll() is None for child in children):
        print(f"{len(paths.read_text().split())} files are left", flush=True)
        until_s = time.monotonic() + SAY_EVERY_S
        while time.monotonic() < until_s and any(child.poll() is None for child in children):
            time.sleep(0.2)
    for log in sorted(paths.parent.glob("*.log")):
        print(log.read_text(errors="replace"), flush=True)
    return [child.wait() for child in children]


def worst(statuses: Iterable[int]) -> int:
    """A failure's status if there is one, and that of a part without tests if no process had any."""
    return max(statuses, key=lambda status: (status not in (0, NO_TESTS), status == 0))


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
    with tempfile.TemporaryDirectory(prefix="tgi-tests-", ignore_cleanup_errors=True) as folder:
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
