"""Memory that the C library keeps after it was freed, given back to the system."""

import ctypes
import sys


def give_back_memory() -> None:
    """Takes up to 0.1 s after much work, without the interpreter lock. Does nothing without glibc."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
