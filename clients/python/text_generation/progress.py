"""How far a `map` is, as one line on a terminal that is drawn again and again."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

BAR_CHARACTERS = 20
REDRAW_S = 0.1


class Progress:
    def __init__(self, total: int, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """`total`: number of items. `clock`: returns seconds."""
        self._total = total
        self._out = out
        self._clock = clock
        self._started = clock()
        self._drawn: float | None = None
        self._width = 0
        self._done = self._failed = 0

    def advance(self, failed: bool) -> None:
        self._done += 1
        self._failed += failed
        now = self._clock()
        if self._drawn is None or now - self._drawn >= REDRAW_S:
            self._drawn = now
            self._draw(self.line(now))

    def close(self) -> None:
        self._draw(self.line(self._clock()))
        self._out.write("\n")
        self._out.flush()

    def line(self, now: float) -> str:
        share = self._done / self._total if self._total else 1.0
        bar = "#" * round(BAR_CHARACTERS * share)
        waited_s = now - self._started
        words = [f"[{bar:.<{BAR_CHARACTERS}}] {self._done}/{self._total}"]
        if self._done and waited_s > 0:
            left_s = waited_s * (self._total - self._done) / self._done
            words += [f"{self._done / waited_s:.1f}/s", f"{left_s:.0f} s left" if left_s else f"{waited_s:.1f} s"]
        if self._failed:
            words.append(f"{self._failed} failed")
        return ", ".join(words)

    def _draw(self, line: str) -> None:
        self._out.write(f"\r{line:<{self._width}}")
        self._out.flush()
        self._width = len(line)


def progress_of(total: int, wanted: bool | None) -> Progress | None:
    """The progress of `total` items on stderr, if it is `wanted`; None: only on a terminal."""
    out: TextIO | None = sys.stderr  # None in a program without a console
    if out is None or not total:
        return None
    return Progress(total, out) if wanted or (wanted is None and out.isatty()) else None
