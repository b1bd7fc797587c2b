"""Cuts a text off before a stop string, as OpenAI does. Text that may be how a stop string begins is held back."""

from collections import deque
from collections.abc import Sequence

from text_generation_router.text.tokens.events import Part


class StopCutter:
    def __init__(self, stop: Sequence[str]) -> None:
        """`stop`: texts that are not empty."""
        self._stop = tuple(stop)
        self._longest = max(map(len, stop))
        self.found: str | None = None  # the stop string that has ended the text
        # Parts that are held back, each (text in which stop strings are searched, the part of it that is given out,
        # whether it is a special token's text).
        self._held: deque[tuple[str, str, bool]] = deque()

    def push(
        self, shown: str, plain: str, may_stop: bool = True, special: bool = False
    ) -> tuple[tuple[Part, ...], bool]:
        """Adds a part of the text. `plain` is how `shown` begins: `shown` also has the text of a special token, which
        is not given out. `special`: whether all of it is a special token's text. Returns (the parts that certainly come
        before any stop string, whether a stop string has ended). `may_stop`: whether a stop string that ends in this
        part ends the text.
        """
        self._held.append((shown, plain, special))
        text = "".join(part for part, _, _ in self._held)
        found = self._first_in(text, len(text) - len(shown)) if may_stop else None
        if found is not None:
            return self._take(found), True
        return self._take(len(text) - self._open_chars(text)), False

    def flush(self) -> tuple[Part, ...]:
        """The parts that are held back, when no more text follows."""
        return self._take(sum(len(shown) for shown, _, _ in self._held))

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

    def _take(self, size: int) -> tuple[Part, ...]:
        """Takes the next `size` characters off the held parts. Returns what is given out of them."""
        given = []
        while size and self._held:
            shown, plain, special = self._held.popleft()
            if len(shown) > size:
                self._held.appendleft((shown[size:], plain[size:], special))
            if plain[:size]:
                given.append(Part(plain[:size], special))
            size -= min(size, len(shown))
        return tuple(given)
