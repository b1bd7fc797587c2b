"""Runs one of our modules in another process: to read files that we do not trust, or to import large libraries."""

import signal
import subprocess
import sys

from text_generation_common.errors import WeightsError


def run_child(module: str, *arguments: str) -> None:
    """Runs `python -m module arguments…`. WeightsError with the last line of the child's stderr if it fails."""
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    if result.returncode < 0:
        name = signal.Signals(-result.returncode).name
        raise WeightsError(f"{module} was killed by {name}: is there enough memory? Run the same command again")
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or [
            f"{module} failed without an error message"
        ]
        raise WeightsError(lines[-1].strip().removeprefix("Error: "))
