"""Returns freed memory to the operating system. The C library would keep it."""

import ctypes
import sys


def give_back_memory() -> None:
    """Returns freed memory. Takes up to 0.1 s after much work; the interpreter lock is free meanwhile. Without glibc it
    does nothing.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
