"""How many messages without effect a front may send."""

# Messages without effect that a front may send at once, and each second. Even a correct front sends a few for each
# request: a message about a request that has just ended has no effect.
AT_ONCE, PER_SECOND = 4096, 1024


class Allowance:
    """Counts messages without effect, and forgets PER_SECOND of them each second."""

    def __init__(self, now_s: float) -> None:
        self._left = float(AT_ONCE)
        self._counted_s = now_s

    def take(self, now_s: float) -> bool:
        """Counts one message. False: there were too many."""
        self._left = min(AT_ONCE, self._left + (now_s - self._counted_s) * PER_SECOND) - 1
        self._counted_s = now_s
        return self._left >= 0
