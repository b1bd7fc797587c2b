"""How much news an engine may send: one that floods a front is cut off before it costs the others much."""

from text_generation_router.wire.errors import WireError

# Bytes that may come at once: the whole cache of an engine with 8 million blocks. Then bytes per second: many times the
# news of an engine that computes 100,000 tokens per second.
BURST_BYTES, BYTES_PER_S = 64 * 2**20, 2 * 2**20
# What a message counts beside its own bytes: about the bytes that take as long to read.
MESSAGE_BYTES = 1024


class NewsBudget:
    """Times are seconds of a clock that never goes back."""

    def __init__(self, now: float) -> None:
        self._left = float(BURST_BYTES)
        self._at = now

    def take(self, size: int, now: float) -> None:
        """Raises WireError for a message of `size` bytes that is too much."""
        self._left = min(self._left + (now - self._at) * BYTES_PER_S, BURST_BYTES) - size - MESSAGE_BYTES
        self._at = now
        if self._left < 0:
            raise WireError("an engine sent too much news")
