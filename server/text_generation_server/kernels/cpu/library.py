"""The compiled kernels: which of the libraries suits this processor, and what its functions take."""

import ctypes
import logging
from pathlib import Path

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

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "embed": [_P, _L, _P, _L, _P, _I],
    "rms_norm": [_P, _P, _L, _L, _I, _P, _F, _P, _I],
    "silu_mul": [_P, _L, _L, _I, _P, _I],
    "rope_and_store": [_P, _L, _L, _L, _L, _I, _P, _P, _P, _P, _P, _I, _P, _I],
    "attend": [_P, _L, _I, _P, _L, _L, _P, _P, _L, _L, _I, _P, _L, _P, _P, _F, _I],
    "place": [_P, _P, _L, _P, _P, _L, _P, _P, _P, _P],
    "advance": [_P, _L, _P, _P, _P, _L],
    "draw": [_P, _L, _L, _L, _P, _P, _P, _P, _P, _P, _I],
    "check_finite": [_P, _L, _L, _L, _P, _I],
}
# Only libraries for processors with the instructions have these.
_OPTIONAL_SIGNATURES = {
    "gemm": [_P, _L, _L, _P, _L, _I, _P, _P, _I, _I, _P, _P, _I],
    "attend_chunk": [_P, _L, _P, _L, _P, _P, _L, _L, _I, _P, _L, _L, _F, _P, _I],
}


class Library(ctypes.CDLL):
    """The functions of csrc/, and the name of the processor they were compiled for."""

    def __init__(self, target: str) -> None:
        # torch has loaded the OpenMP run-time of that name already, so its threads are the ones that compute here.
        super().__init__(str(library_path(target)))
        self.target = target
        optional = {name: s for name, s in _OPTIONAL_SIGNATURES.items() if hasattr(self, name)}
        self.has_gemm = "gemm" in optional
        self.has_attend_chunk = "attend_chunk" in optional
        for name, arguments in (_SIGNATURES | optional).items():
            function = getattr(self, name)
            function.argtypes, function.restype = arguments, None


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
    return target != "amx" or library.request_tiles() == 0
