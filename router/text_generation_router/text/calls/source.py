"""The model's text as the parts of a reader take it: they read on, and wait where a decision needs more text.

A part of a reader is a generator (`Steps`) that yields while it waits. What it decides follows from the text alone,
never from where one push ends and the next begins.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

from text_generation_router.text.calls.found_calls import NotACallError, TextEndedError

T = TypeVar("T")
Steps = Generator[None, None, T]
Give = Callable[[str], None]

_SPACES = re.compile(r"[ \t\r\n]*")
# Fewer characters than this, with which a marker begins, may be prose. Surrogates stand for special tokens.
FEWEST_CHARS = 3
_SURROGATE = re.compile("[\ud800-\udfff]")


class Scanner(Protocol):
    """Follows one value, in whatever notation."""

    is_done: bool
    is_broken: bool  # the next character cannot belong to the value

    @property
    def rest(self) -> str:
        """What has been read and not been given."""
        ...

    def scan(self, text: str, at: int, end: int, parts: list[str]) -> int:
        """Reads `text` from `at`, at most up to `end`. Returns where it stopped. `parts` gets JSON text."""
        ...


class Markers:
    """Texts that are searched for. None may be the beginning of another."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = frozenset(text for text in texts if text)
        parts = [f"{re.escape(text)}|{_beginning_at_the_end(text)}" for text in sorted(self.texts)]
        self.pattern = re.compile("|".join(parts) or r"(?!)")


def _beginning_at_the_end(text: str) -> str:
    """A pattern for each beginning of `text` that ends where all text ends."""
    pattern = ""
    for character in reversed(text[1:-1]):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return re.escape(text[0]) + pattern + r"\Z"


class Source:
    """Text that has come and has not been read. At most a marker's length of it waits between two pushes."""

    def __init__(self) -> None:
        self.work = 0  # number of characters looked at; a test holds it to a multiple of the text's length
        self._text = ""
        self._at = 0
        self._ended = False
        self._is_cut = False
        self._held: list[str] | None = None  # what has been read since `hold`

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0
        self.work += len(self._text)

    def end(self, is_cut: bool = False) -> None:
        """`is_cut`: the text would go on. The beginning of a marker with which it ends is then no text."""
        self._ended, self._is_cut = True, is_cut

    @property
    def undecided(self) -> str | None:
        """What has come since `hold`, read or not; None: nothing is held."""
        return None if self._held is None else "".join((*self._held, self._text[self._at :]))

    def hold(self, before: str = "") -> None:
        """Keeps what is read from here on, until `release`, in case that it must be given as text after all."""
        self._held = [before]

    def release(self) -> str:
        """What has been read since `hold`. It is not kept any longer."""
        held, self._held = self._held, None
        return "".join(held or ())

    def peek(self) -> Steps[str]:
        """The next character; "" at the end of the text."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def spaces(self) -> Steps[str]:
        """Reads white space."""
        parts = []
        while True:
            found = _SPACES.match(self._text, self._at)
            assert found is not None
            parts.append(self._take(found.end()))
            if self._at < len(self._text) or self._ended:
                return "".join(parts)
            yield

    def match(self, texts: Sequence[str]) -> Steps[str]:
        """Reads one of `texts` and returns it, or "" if none of them follows. None may be the beginning of another."""
        longest = max(map(len, texts), default=0)
        while True:
            rest = self._text[self._at : self._at + longest]
            for text in texts:
                if rest.startswith(text):
                    self._take(self._at + len(text))
                    return text
            if self._ended and rest and any(text.startswith(rest) for text in texts):
                self._leave_out_marker(rest)
            if self._ended or not any(text.startswith(rest) for text in texts):
                return ""
            yield

    def ends_within(self, texts: Sequence[str]) -> bool:
        """Reads what is left if the text has ended within one of `texts`."""
        rest = self._text[self._at :]
        is_cut = self._ended and bool(rest) and any(text.startswith(rest) for text in texts)
        if is_cut:
            self._take(len(self._text))
        return is_cut

    def expect(self, text: str) -> Steps[None]:
        if not (yield from self.match((text,))):
            raise TextEndedError if self._ended and text.startswith(self._text[self._at :]) else NotACallError

    def run(self, characters: re.Pattern[str], most: int) -> Steps[str]:
        """Reads characters that `characters` matches. NotACallError if there are more than `most`."""
        parts, size = [], 0
        while True:
            found = characters.match(self._text, self._at, self._at + most + 1 - size)
            if found:
                size += found.end() - self._at
                parts.append(self._take(found.end()))
            if size > most:
                raise NotACallError
            if self._at < len(self._text):
                return "".join(parts)
            if self._ended:
                raise TextEndedError
            yield

    def follow(self, scanner: Scanner, give: Give, most: int | None = None) -> Steps[bool]:
        """Reads one value. False: what follows cannot belong to it. NotACallError if it is longer than `most`."""
        size = 0
        while not scanner.is_done:
            if not (yield from self.peek()):
                give(scanner.rest)
                raise TextEndedError
            end = len(self._text) if most is None else min(len(self._text), self._at + most - size)
            if end == self._at:
                raise NotACallError
            parts: list[str] = []
            read = scanner.scan(self._text, self._at, end, parts)
            size += read - self._at
            self._take(read)
            give("".join(parts))
            if scanner.is_broken:
                return False
        return True

    def copy_until(self, markers: Markers, give: Give) -> Steps[bool]:
        """Gives all text before the first of `markers`, as soon as it is certain. False: there is none."""
        while True:
            found = markers.pattern.search(self._text, self._at)
            end = len(self._text) if found is None else found.start()
            if end > self._at:
                give(self._take(end))
            if found is not None and found.group() in markers.texts:
                return True
            if self._ended:
                self._leave_out_marker(self._text[self._at :])
                if self._at < len(self._text):  # a marker's beginning, and no more
                    give(self._take(len(self._text)))
                return False
            yield

    def _leave_out_marker(self, beginning: str) -> None:
        """Skips `beginning`, a marker's, with which the text ends, unless it may be prose."""
        if self._is_cut and (len(beginning) >= FEWEST_CHARS or _SURROGATE.search(beginning)):
            self._take(len(self._text))

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._held is not None:
            self._held.append(text)
        return text
