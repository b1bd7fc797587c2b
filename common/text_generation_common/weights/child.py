"""Runs one of our modules in another process: to read files that we do not trust, or to import large libraries. A child
that reads limits itself by the size of what it reads: a file may ask for any work and memory.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from text_generation_common.errors import WeightsError, first_line
from text_generation_common.gguf.container import header_end, is_gguf
from text_generation_common.secret_values import inherited_environment

MIB = 2**20
# A reader's memory beyond that of its imports, and its processor time.
READER_BYTES, READER_BYTES_PER_BYTE = 256 * MIB, 20
READER_S, READER_BYTES_PER_S = 5, 10_000_000
OUT_OF_TIME = "it takes more processor time than a file of its size may take"
OUT_OF_MEMORY = "it takes more memory than a file of its size may take, or than is free"


def run_child(module: str, *arguments: str) -> None:
    """Runs `python -m module arguments…`. WeightsError with the last line of the child's stderr if it fails."""
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=inherited_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    if result.returncode < 0:
        raise WeightsError(f"{module} {why_killed(result.returncode)}")
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or [
            f"{module} failed without an error message"
        ]
        raise WeightsError(lines[-1].strip().removeprefix("Error: "))


def why_killed(status: int) -> str:
    """Why a signal has ended a reader with this exit status."""
    number = signal.Signals(-status)
    return f"was killed by {number.name}: {OUT_OF_TIME if number is signal.SIGXCPU else OUT_OF_MEMORY}"


def limit_reader(files: Iterable[Path]) -> None:
    """Limits memory and processor time that this process takes from now on, by the sizes of the files that it reads.
    Call it after slow imports. The kernel reports the present memory on Linux only: elsewhere memory has no limit."""
    size = sum(map(_bytes_read, files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(usage.ru_utime + usage.ru_stime) + READER_S + size // READER_BYTES_PER_S
    _lower(resource.RLIMIT_CPU, seconds)
    if sys.platform == "linux":
        data_pages = int(Path("/proc/self/statm").read_text().split()[5])
        data_bytes = data_pages * os.sysconf("SC_PAGE_SIZE")
        _lower(resource.RLIMIT_DATA, data_bytes + READER_BYTES + READER_BYTES_PER_BYTE * size)


def _bytes_read(file: Path) -> int:
    """The size of a file. `file.gguf/tokenizer.json` is made of the header of the GGUF file."""
    if is_gguf(file.parent):
        return header_end(file.parent)
    return file.stat().st_size if file.is_file() else 0


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main_of(work: Callable[..., None]) -> None:
    """The main function of such a module: calls `work` with its paths, and ends with one line if that fails."""
    try:
        work(*map(Path, sys.argv[1:]))
    except (SystemExit, KeyboardInterrupt):
        raise
    except MemoryError:
        sys.exit(f"Error: {OUT_OF_MEMORY}")
    # Libraries raise errors of many classes, and a panic of Rust code is not an Exception. The parent prints this line.
    except BaseException as error:
        sys.exit(f"Error: {first_line(error)}")
