"""The compiled kernels: chooses the library that suits this processor, and calls its functions.

csrc/arguments.h declares the arguments of each kernel; here they are passed by name.
"""

import ctypes
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor

from text_generation_common.cpu_features import lacking, processor_flags
from text_generation_server.errors import OptionError
from text_generation_server.kernels.cpu.build import (
    CONSTANTS,
    KERNELS,
    PORTABLE,
    SOURCES_DIGEST,
    TARGETS,
    WORD_BYTES,
    Arguments,
    library_path,
    why_skipped,
)

TYPES = {
    torch.float32: CONSTANTS["F32"],
    torch.bfloat16: CONSTANTS["BF16"],
    torch.int8: CONSTANTS["I8"],
    torch.float8_e4m3fn: CONSTANTS["F8"],
}

# The processor feature that VPDPBUSD is, for targets of which only some processors have it.
VNNI = {"avx512": "avx512_vnni", "avx2": "avx_vnni"}

Word = int | float
Argument = Word | Tensor | None


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel and its arguments, by name."""

    kernel: str
    arguments: Mapping[str, Word]


class CallObserver(Protocol):
    """Receives each kernel call that is not part of a program, after it was made."""

    def on_call(self, call: Call) -> None: ...


class Packer:
    """Packs the arguments of one kernel's calls as `struct call` of team.h."""

    def __init__(self, address: int, arguments: Arguments) -> None:
        unused = (CONSTANTS["MAX_ARGUMENTS"] - len(arguments)) * WORD_BYTES
        self._struct = struct.Struct(f"P{''.join(arguments.values())}{unused}x")
        self._address = address
        self._names = arguments.keys()
        self._in_order = itemgetter(*arguments)

    def pack(self, arguments: Mapping[str, Word]) -> bytes:
        assert arguments.keys() == self._names, f"given: {list(arguments)}, taken: {list(self._names)}"
        return self._struct.pack(self._address, *self._in_order(arguments))


class Library:
    """The compiled functions of csrc/ for one target."""

    def __init__(self, target: str) -> None:
        functions = ctypes.CDLL(str(library_path(target)))
        self.target = target
        self.has_vnni = VNNI.get(target) in processor_flags()
        self.observer: CallObserver | None = None
        self._max_threads = sys.maxsize
        self._run = functions.run_calls
        self._run.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_void_p]
        self._run.restype = None
        if hasattr(functions, "gemm_scratch"):
            self.gemm_scratch = functions.gemm_scratch
            self.gemm_scratch.argtypes = [ctypes.c_long] * 3 + [ctypes.c_int] * 2
            self.gemm_scratch.restype = ctypes.c_long
        self.gemm_codes_scratch = functions.gemm_codes_scratch
        self.gemm_codes_scratch.argtypes = [ctypes.c_long] * 3 + [ctypes.c_int]
        self.gemm_codes_scratch.restype = ctypes.c_long
        self.gemm_ints_scratch = functions.gemm_ints_scratch
        self.gemm_ints_scratch.argtypes = [ctypes.c_long] * 2
        self.gemm_ints_scratch.restype = ctypes.c_long
        self.experts_ints_scratch = functions.experts_ints_scratch
        self.experts_ints_scratch.argtypes = [ctypes.c_long] * 2
        self.experts_ints_scratch.restype = ctypes.c_long
        self.experts_codes_scratch = functions.experts_codes_scratch
        self.experts_codes_scratch.argtypes = [ctypes.c_long] * 3
        self.experts_codes_scratch.restype = ctypes.c_long
        self.wake: Callable[[], None] = functions.wake_team
        functions.wake_team.restype = None
        self.end_team: Callable[[], None] = functions.end_team
        functions.end_team.restype = None
        # Kernels whose instructions the target lacks are not in its library.
        self._packers = {
            name: Packer(ctypes.cast(getattr(functions, name), ctypes.c_void_p).value or 0, arguments)
            for name, arguments in KERNELS.items()
            if hasattr(functions, name)
        }

    def limit_threads(self, most: int) -> None:
        """From now on no call takes more threads, whatever it asks for."""
        self._max_threads = most

    def allowed(self, threads: int) -> int:
        """How many threads a call takes that asks for `threads`."""
        return min(threads, self._max_threads)

    def has(self, kernel: str) -> bool:
        return kernel in self._packers

    def call(self, threads: int, kernel: str, /, **arguments: Argument) -> None:
        """The arguments are those of the kernel's struct in arguments.h. C gets the address of a tensor, and 0 for
        None."""
        words = _words(arguments)
        self._run(self._packers[kernel].pack(words), 1, self.allowed(threads), None)
        if self.observer is not None:
            self.observer.on_call(Call(kernel, words))

    def table(self, kernel: str, rows: Sequence[Mapping[str, Argument]]) -> Tensor:
        """The arguments of several calls of a kernel, for a kernel that computes all of them; 0 for those that a row
        lacks. The tensors must be kept."""
        names = KERNELS[kernel]
        packer = struct.Struct("".join(names.values()))
        packed = b"".join(packer.pack(*(_words({n: row.get(n) for n in names}).values())) for row in rows)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def pack(self, calls: Sequence[Call]) -> bytes:
        return b"".join(self._packers[call.kernel].pack(call.arguments) for call in calls)

    def run(self, packed: bytes, threads: int, ends: int | None = None) -> None:
        """Makes packed calls one after the other, without a return to Python in between.

        `ends` is the address of one float64 number for each call: the monotonic clock after the call, in seconds.
        """
        self._run(packed, len(packed) // CALL_BYTES, self.allowed(threads), ends)


def _words(arguments: Mapping[str, Argument]) -> dict[str, Word]:
    return {name: value.data_ptr() if isinstance(value, Tensor) else value or 0 for name, value in arguments.items()}


CALL_BYTES = (1 + CONSTANTS["MAX_ARGUMENTS"]) * WORD_BYTES


@dataclass(frozen=True, slots=True)
class Choice:
    """The best target that is usable on this machine, or None; and the reason why the next better target is not
    usable.
    """

    target: str | None
    better: str | None
    reason: str


def choose_target() -> Choice:
    better, reason = None, ""
    for target in (*TARGETS, *PORTABLE):
        obstacle = why_not(target)
        if obstacle is None:
            return Choice(target, better, reason)
        better, reason = target, obstacle
    return Choice(None, better, reason)


def require_target(target: str) -> Choice:
    """The choice of this target. OptionError if its library cannot be used on this machine."""
    if obstacle := why_not(target):
        usable = ", ".join(other for other in (*TARGETS, *PORTABLE) if why_not(other) is None)
        instead = f"leave it out, or choose one of {usable}" if usable else "leave it out"
        raise OptionError(f"--cpu-target {target} cannot be used, since {obstacle}: {instead}")
    return Choice(target, None, "")


def why_not(target: str) -> str | None:
    """The reason why a target's library cannot be used on this machine, or None if it can."""
    if missing := lacking(target, processor_flags()):
        return missing
    if not library_path(target).exists():
        return why_skipped().get(target, "it was not built; install the package again")
    try:
        library = ctypes.CDLL(str(library_path(target)))
    except OSError as error:  # a library that was built on another machine may need a newer C library
        return f"it cannot be loaded: {error}"
    if _digest_in(library) != SOURCES_DIGEST:
        return "it was built from other C sources; install the package again"
    if target == "amx" and library.request_matrix_unit() != 0:
        return "the system refuses the use of the matrix unit"
    return None


def _digest_in(library: ctypes.CDLL) -> str | None:
    try:
        return ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "sources_digest"))).decode()
    except ValueError:  # the library has no such symbol
        return None
