"""Cuts a text off before a stop string, as OpenAI does. Text that may be how a stop string begins is held back."""

from collections import deque
from collections.abc import Sequence


class StopCutter:
    def __init__(self, stop: Sequence[str]) -> None:
        """`stop`: texts that are not empty."""
        self._stop = tuple(stop)
        self._longest = max(map(len, stop))
        self.found: str | None = None  # the stop string that has ended the text
        # Pieces that are held back, each (text in which stop strings are searched, the part of it that is given out).
        self._held: deque[tuple[str, str]] = deque()

    def push(self, shown: str, plain: str, may_stop: bool = True) -> tuple[str, bool]:
        """Adds a piece of text. `plain` is how `shown` begins: `shown` also has the text of a special token, which is
        not given out. Returns (the text that certainly comes before any stop string, whether a stop string has ended).
        `may_stop`: whether a stop string that ends in this piece ends the text.
        """
        self._held.append((shown, plain))
        text = "".join(piece for piece, _ in self._held)
        found = self._first_in(text, len(text) - len(shown)) if may_stop else None
        if found is not None:
            return self._take(found), True
        return self._take(len(text) - self._open_chars(text)), False

    def flush(self) -> str:
        """The text that is held back, when no more text follows."""
        return self._take(sum(len(shown) for shown, _ in self._held))

    def _first_in(self, text: str, old: int) -> int | None:
        """Where the stop string begins that is complete first, behind the `old` first characters; None if there is
        none."""
        starts = ((stop, text.find(stop, max(old - len(stop) + 1, 0))) for stop in self._stop)
        places = [(at + len(stop), at, stop) for stop, at in starts if at >= 0]
        if not places:
            return None
        _, at, self.found = min(places)
        return at

    def _open_chars(self, text: str) -> int:
        """Most characters at the end of `text` with which a stop string begins."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0

    def _take(self, size: int) -> str:
        """Takes the next `size` characters off the held pieces. Returns what is given out of them."""
        given = []
        while size and self._held:
            shown, plain = self._held.popleft()
            if len(shown) > size:
                self._held.appendleft((shown[size:], plain[size:]))
            given.append(plain[:size])
            size -= min(size, len(shown))
        return "".join(given)
