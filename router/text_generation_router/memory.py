"""Memory that the C library keeps after it was freed, given back to the system."""

import asyncio
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

# Seconds after the last large piece of work. The second time is for the texts that were still needed the first time.
DELAYS_S = (2.0, 30.0)


def give_back_memory() -> None:
    """Takes up to 0.1 s after much work, without the interpreter lock. Does nothing without glibc."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class Tidying:
    """Gives back memory when no large work has been done for a while: beside such work it would be wanted again at
    once. For one event loop."""

    def __init__(self, give_back: Callable[[], None] = give_back_memory, delays_s: Sequence[float] = DELAYS_S) -> None:
        self._give_back = give_back
        self._delays_s = delays_s
        self._at_work = 0
        self._timers: list[asyncio.TimerHandle] = []

    @contextmanager
    def after(self) -> Iterator[None]:
        """Around each piece of large work."""
        self._at_work += 1
        for timer in self._timers:
            timer.cancel()
        self._timers = []
        try:
            yield
        finally:
            self._at_work -= 1
            if not self._at_work:
                loop = asyncio.get_running_loop()
                self._timers = [loop.call_later(delay_s, self._tidy) for delay_s in self._delays_s]

    def _tidy(self) -> None:
        asyncio.get_running_loop().run_in_executor(None, self._give_back)
