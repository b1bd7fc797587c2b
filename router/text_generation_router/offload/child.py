"""A child process of the pool: reads jobs from stdin, answers on stdout (the same socket), and ends with its parent.

Started as `python -m text_generation_router.offload.child PARENT_PID MEMORY_BYTES CPU_SECONDS MODULE:FUNCTION`. The
function gets the pool's setup bytes and returns the handlers by name; a handler takes bytes and returns bytes.
"""

import ctypes
import gc
import importlib
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import BinaryIO, NoReturn

from text_generation_router.offload.malloc import give_back_memory

# The protocol of the pool and its children. A frame is a 4-byte big-endian length and its content; no pickle is read.
# The pool sends one frame of setup, then for each job two frames: the handler's name, the content. A child answers
# the setup (once the child is ready) and each job with one byte that is a `JobOutcome`, one byte that says whether
# the child ends now, and a frame.

LENGTH = struct.Struct(">I")
ANSWER_HEAD = struct.Struct(">BBI")  # the outcome, whether the child ends now, the length of the answer


class JobOutcome(IntEnum):
    DONE = 0
    FAILED = 1


Handler = Callable[[bytes], bytes]
MakeHandlers = Callable[[bytes], Mapping[str, Handler]]

PR_SET_PDEATHSIG = 1
PAGE_BYTES = resource.getpagesize()
# Bytes of resident memory that finished jobs may leave behind in a child.
KEPT_BYTES = 16 * 2**20


def main() -> None:
    parent, memory_bytes, cpu_s, entry = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    _end_with(parent)
    jobs, answers = sys.stdin.buffer, _take_stdout()
    handlers = _handlers(entry, _read_frame(jobs))
    gc.collect()
    gc.freeze()
    _limit_memory(memory_bytes)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold prompts
    resident = _resident_bytes()
    _write(answers, JobOutcome.DONE, False, b"")  # ready
    while True:
        name = _read_frame(jobs).decode()
        content = _read_frame(jobs)
        # The kernel ends the process with SIGPROF when the timer expires, also in native code.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        outcome, answer = _run(handlers, name, content)
        del content
        ends_now = _has_grown(resident + len(answer))
        _write(answers, outcome, ends_now, answer)
        del answer
        if ends_now:
            _end()


def _write(answers: BinaryIO, outcome: JobOutcome, ends_now: bool, answer: bytes) -> None:
    answers.write(ANSWER_HEAD.pack(outcome, ends_now, len(answer)))
    answers.write(answer)
    answers.flush()


def _run(handlers: Mapping[str, Handler], name: str, content: bytes) -> tuple[JobOutcome, bytes]:
    try:
        return JobOutcome.DONE, handlers[name](content)
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> tuple[JobOutcome, bytes]:
    """The answer from which the pool makes a JobFailedError, and the route an answer to its client."""
    return JobOutcome.FAILED, type(error).__name__.encode()


def _has_grown(resident_before: int) -> bool:
    """Whether finished jobs left more than KEPT_BYTES of memory behind, even after collecting and trimming. Then the
    child ends, which surely returns the memory to the system.
    """
    if _resident_bytes() - resident_before <= KEPT_BYTES:
        return False
    gc.collect()
    give_back_memory()
    return _resident_bytes() - resident_before > KEPT_BYTES


def _handlers(entry: str, setup: bytes) -> Mapping[str, Handler]:
    module, _, function = entry.partition(":")
    make: MakeHandlers = getattr(importlib.import_module(module), function)
    return make(setup)


def _take_stdout() -> BinaryIO:
    """The file for answers, which is the original stdout. From now on `print` writes to stderr, so that it cannot
    corrupt the answers.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _read_frame(stream: BinaryIO) -> bytes:
    (length,) = LENGTH.unpack(_read(stream, LENGTH.size))
    return _read(stream, length)


def _read(stream: BinaryIO, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        _end()  # the pool has closed its end of the socket, or has died
    return content


def _end() -> NoReturn:
    """Exits at once: nothing is left to write, and freeing a large heap takes time."""
    os._exit(0)


def _end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends, even in the middle of a job. Linux only: elsewhere the
    child ends when it reads the next job."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        _end()


def _limit_memory(more_bytes: int) -> None:
    """Limits the data memory of this process to its present size plus `more_bytes`. Linux only: elsewhere the kernel
    does not report the present size."""
    if sys.platform == "linux":
        data_pages = int(_statm()[5])
        resource.setrlimit(resource.RLIMIT_DATA, (data_pages * PAGE_BYTES + more_bytes,) * 2)


def _resident_bytes() -> int:
    return int(_statm()[1]) * PAGE_BYTES if sys.platform == "linux" else 0


def _statm() -> list[bytes]:
    """Memory of this process in pages: size, resident, shared, text, library, data, dirty."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return file.read().split()


if __name__ == "__main__":
    main()
