"""How fast a front may send messages, and call for news: what comes faster waits in the front's own connection."""

# Units of a front's messages at once, and each second. A message is one unit, and one more for each PART bytes.
AT_ONCE, PER_SECOND, PART = 16384, 16384, 4096
# News calls of a front at once, and each second.
NEWS_AT_ONCE, NEWS_PER_SECOND = 8, 2


class Pace:
    """`now_s`: seconds of a clock that never goes back."""

    def __init__(self, at_once: float, per_second: float, now_s: float) -> None:
        self._at_once = at_once
        self._per_second = per_second
        self._left = at_once
        self._counted_s = now_s

    def left(self, now_s: float) -> float:
        """Units that may be taken without a wait."""
        return min(self._at_once, self._left + (now_s - self._counted_s) * self._per_second)

    def take(self, units: float, now_s: float) -> float:
        """Takes as many units. Returns the seconds to wait before the next are taken."""
        self._left = self.left(now_s) - units
        self._counted_s = now_s
        return max(0.0, -self._left / self._per_second)
