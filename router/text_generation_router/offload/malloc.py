"""Returns freed memory to the operating system, which the C library would keep: at once, or some time after large work
has ended.
"""

import asyncio
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def give_back_memory() -> None:
    """Returns freed memory. Takes up to 0.1 s after much work; the interpreter lock is free meanwhile. Without glibc it
    does nothing.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


# Seconds after the last large piece of work at which memory is trimmed. The second time is for texts that were still in
# use at the first.
DELAYS_S = (2.0, 30.0)


class Tidying:
    """Trims memory after large work, once no large work runs: running work would need the memory again at once. For use
    in one event loop.
    """

    def __init__(self, give_back: Callable[[], None] = give_back_memory, delays_s: Sequence[float] = DELAYS_S) -> None:
        self._give_back = give_back
        self._delays_s = delays_s
        self._at_work = 0
        self._timers: list[asyncio.TimerHandle] = []

    @contextmanager
    def after(self) -> Iterator[None]:
        """A context to be put around each large piece of work."""
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
