"""How often a front wants news of its engines, and how much news an engine may send."""

from text_generation_router.wire.version import WireError

# Bytes that may come at once: the whole cache of an engine with 8 million blocks. Then bytes per second: many times the
# news of an engine that computes 100,000 tokens per second.
BURST_BYTES, BYTES_PER_S = 64 * 2**20, 2 * 2**20
# Bytes that a message counts beside its own: about as many as take as long to read.
MESSAGE_BYTES = 1024


# Milliseconds between two news of an engine: the fewest and the most, and how many more for each engine of the front.
# A message costs a front about 0.1 ms, so reading takes about 1 % of a core, or 0.1 ms for each engine and second.
EVERY_MS, MAX_EVERY_MS, MS_PER_ENGINE = 250, 1000, 10


def next_pace_ms(pace_ms: int, engines: int) -> int:
    """The milliseconds between two news for a front with `engines` engines, which now gets them every `pace_ms`. The
    pace changes in steps, and not with every engine that comes and goes, because a change costs a new call."""
    wanted_ms = min(max(MS_PER_ENGINE * engines, EVERY_MS), MAX_EVERY_MS)
    while pace_ms < wanted_ms:
        pace_ms *= 2
    while pace_ms > max(EVERY_MS, 4 * MS_PER_ENGINE * engines):
        pace_ms //= 2
    return pace_ms


class NewsBudget:
    """An engine that floods a front is cut off before it costs the other engines much. Times are seconds of a clock
    that never goes back."""

    def __init__(self, now: float) -> None:
        self._left = float(BURST_BYTES)
        self._at = now

    def take(self, size: int, now: float) -> None:
        """Raises WireError for a message of `size` bytes that is too much."""
        self._left = min(self._left + (now - self._at) * BYTES_PER_S, BURST_BYTES) - size - MESSAGE_BYTES
        self._at = now
        if self._left < 0:
            raise WireError("an engine sent too much news")
