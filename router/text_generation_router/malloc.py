"""Returns freed memory to the system, which the C library would keep."""

import ctypes
import sys


def give_back_memory() -> None:
    """Takes up to 0.1 s after much work, during which the interpreter lock is free. Without glibc it does nothing."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
