"""Imports the libraries it is told of, then forks a run of the tests for each line on its input, which is a time limit
in seconds. Nothing of ours is imported before the fork, so that each run reads the files as they are then."""

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import time
import traceback

KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timed out"
HYPOTHESIS_IS_IMPORTED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
PR_SET_CHILD_SUBREAPER = 36
OK = 0


def main() -> None:
    log, libraries, *tests = sys.argv[1:]
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, see server/conftest.py
    for library in libraries.split():
        importlib.import_module(library)
    # What a test's processes leave behind when they are killed comes to this one, and is ended with the run.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for line in sys.stdin:
        print(run(log, tests, float(line)), flush=True)


def run(log: str, tests: list[str], limit_s: float) -> str:
    child = os.fork()
    if child == 0:
        _run_tests(log, tests)
    deadline = time.monotonic() + limit_s
    status = None
    while status is None and time.monotonic() < deadline:
        pid, raw = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(raw) if pid else None
        time.sleep(0.02)
    _end_descendants()
    if status is None:
        return TIMED_OUT
    return SURVIVED if status == OK else KILLED


def _run_tests(log: str, tests: list[str]) -> None:
    os.setsid()
    to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(to, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import pytest

    status = 3
    try:
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *HYPOTHESIS_IS_IMPORTED, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_descendants() -> None:
    """All of them, also those that have sessions of their own: their parents' deaths bring them here."""
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
