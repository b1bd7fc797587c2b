"""compute-sanitizer on the first case of an earlier stage that failed: it names the thread and the address of a bad
access to memory."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpu_check.findings import Case, Context, FailedCase, Measured, Request
from gpu_check.running import command_of, with_variables

TABLE = "compute-sanitizer on the first case that failed"
PROGRAM = "compute-sanitizer"
LIMIT_S = 60
FOUND = 9  # the program's exit status where it found something
LINES = 60


def examine(context: Context) -> Iterator[Case]:
    failed = context.request.known.failed
    if not failed:
        yield Case(TABLE, {"case": "none failed"}, lambda: [Measured({"found": "–"})])
        return
    yield Case(TABLE, {"case": f"{failed[0].stage}: {failed[0].case}"}, lambda: run(failed[0]))


def run(failed: FailedCase) -> Iterable[Measured]:
    """A finding without a failure says that the case's error is not a bad access to memory."""
    program = shutil.which(PROGRAM)
    if program is None:
        yield Measured({"found": f"not run: {PROGRAM} is not on the PATH"})
        return
    with tempfile.TemporaryDirectory(prefix="tgi-gpu-check-") as folder:
        request = Path(folder) / "request.json"
        Request(failed.function, str(Path(folder) / "journal"), only=failed.case).write(request)
        command = [program, "--tool", "memcheck", "--error-exitcode", str(FOUND), *command_of(request)]
        # torch's allocator would hand out parts of large blocks, within which no access is out of bounds.
        command = with_variables({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, command)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
            print(output)
            yield Measured({"found": f"not done after {LIMIT_S} s"})
            return
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "=====" in line]
    print("\n".join(lines[:LINES]))
    first = next((line.strip("= ") for line in lines if "Invalid" in line or "error" in line.lower()), "nothing")
    yield Measured({"found": first}, failure=first if done.returncode == FOUND else "")
