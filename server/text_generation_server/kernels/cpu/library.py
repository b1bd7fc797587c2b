"""The compiled kernels: which of the libraries suits this processor, and what its functions take."""

import ctypes
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from text_generation_server.kernels.cpu.build import PORTABLE, TARGETS, library_path

log = logging.getLogger("text_generation_server")

# What /proc/cpuinfo must say, which includes what the operating system allows.
NEEDS = {
    "amx": {"amx_bf16", "amx_tile", "avx512_bf16", "avx512_fp16", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512_bf16", "avx512_vnni", "avx512bw", "avx512dq", "avx512vl"},
    "avx2": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
    "portable": set[str](),
}
# The numbers of `enum type` in vectors.h.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}

# The words of each kernel: P a pointer, q an integer, d a floating-point number.
POINTER = "P"
WORDS = {
    "embed": "PqPqP",
    "rms_norm": "PPqqqPdP",
    "silu_mul": "PqqqP",
    "rope_and_store": "PqqqqqPPPPPqP",
    "attend": "PqqPqqPPqqqPqPPd",
    "place": "PPqPPqPPPP",
    "advance": "PqPPPq",
    "draw": "PqqqPPPPPP",
    "check_finite": "PqqqP",
    "gemm_f32": "PqqPqPP",
    # Only libraries for processors with the instructions have these.
    "gemm": "PqqPqqPPqqPP",
    "attend_chunk": "PqPqPPqqqPqqdP",
}
MOST_WORDS = 16  # MOST_WORDS of team.h

Word = int | float


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel and its arguments."""

    kernel: str
    words: tuple[Word, ...]


class Listener(Protocol):
    """Told of every call that is made."""

    def heard(self, call: Call) -> None: ...


class Library:
    """The functions of csrc/, and the name of the processor they were compiled for."""

    def __init__(self, target: str) -> None:
        # torch has loaded the OpenMP run-time of that name already, so its threads are the ones that compute here.
        functions = ctypes.CDLL(str(library_path(target)))
        self.target = target
        self.listener: Listener | None = None
        self._run = functions.run_calls
        self._run.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_void_p]
        self._run.restype = None
        self._addresses = {
            name: ctypes.cast(getattr(functions, name), ctypes.c_void_p).value
            for name in WORDS
            if hasattr(functions, name)
        }
        self._packers = {name: struct.Struct(f"P{w}{(MOST_WORDS - len(w)) * 8}x") for name, w in WORDS.items()}

    def has(self, kernel: str) -> bool:
        return kernel in self._addresses

    def call(self, threads: int, kernel: str, *words: Word) -> None:
        self._run(self._packers[kernel].pack(self._addresses[kernel], *words), 1, threads, None)
        if self.listener is not None:
            self.listener.heard(Call(kernel, words))

    def pack(self, calls: Sequence[Call]) -> bytes:
        return b"".join(self._packers[c.kernel].pack(self._addresses[c.kernel], *c.words) for c in calls)

    def run(self, packed: bytes, threads: int, ends: int | None = None) -> None:
        """Calls one after the other, without a way back to Python in between.

        `ends`: where to put the time after each, float64, seconds of the monotonic clock.
        """
        self._run(packed, len(packed) // CALL_BYTES, threads, ends)


CALL_BYTES = (MOST_WORDS + 1) * 8


def usable_targets() -> list[str]:
    """The built libraries that run here, the best first."""
    flags = _processor_flags()
    return [t for t in (*TARGETS, *PORTABLE) if library_path(t).exists() and NEEDS[t] <= flags and _loads(t)]


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def _loads(target: str) -> bool:
    """What was built elsewhere may miss its run-time here; and the system lends the matrix unit to those who ask."""
    try:
        library = ctypes.CDLL(str(library_path(target)))
    except OSError as error:
        log.warning("the CPU kernels for %s cannot be loaded: %s", target, error)
        return False
    return target != "amx" or library.request_matrix_unit() == 0
