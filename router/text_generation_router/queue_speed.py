"""How fast the queue moves, for those who are told to come again."""

from collections import deque

# So many of the last requests that began count.
WINDOW = 64


class QueueSpeed:
    def __init__(self) -> None:
        self._began: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # when, and with how many prompt tokens

    def note(self, now: float, tokens: int) -> None:
        """A request has begun."""
        self._began.append((now, tokens))

    def note_empty(self) -> None:
        """Nobody waits: what was before says nothing about the next queue."""
        self._began.clear()

    def seconds_for(self, tokens: int, now: float) -> float:
        """How long so many prompt tokens will wait, if it goes on like this. 0: nobody knows."""
        if len(self._began) < 2:
            return 0.0
        begun = sum(count for _, count in self._began)
        return tokens * (now - self._began[0][0]) / begun
