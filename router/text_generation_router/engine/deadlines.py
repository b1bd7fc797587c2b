"""Ends requests whose time has run out."""

import asyncio
from collections.abc import Callable

# Longest deadline of a request, in seconds from its arrival; event loop timers accept no longer delay.
LATEST_DEADLINE_S = 10.0**8


class Deadlines:
    def __init__(self, expire: Callable[[int], None]) -> None:
        """`expire` is called with the index of a request at its deadline."""
        self._expire = expire
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def set(self, index: int, timeout_s: float | None) -> None:
        """Sets the deadline of a request to `timeout_s` seconds from now; None: no deadline."""
        if timeout_s is not None:
            delay_s = min(timeout_s, LATEST_DEADLINE_S)
            self._timers[index] = asyncio.get_running_loop().call_later(delay_s, self._expire, index)

    def clear(self, index: int) -> None:
        """Stops the timer of a request that has ended."""
        if (timer := self._timers.pop(index, None)) is not None:
            timer.cancel()
