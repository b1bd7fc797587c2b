"""Patterns of modules' names in adapter_config.json. They are followed without backtracking: all positions of a name
that a part of the pattern can reach are kept together, as the bits of a number.
"""

import re
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

V = TypeVar("V")
MAX_PATTERN = 256  # characters
# What a pattern may be made of, beside names: `.`, `\.`, `\d`, a set of characters, `(a|b)`, `^` and `$`. Single
# characters and sets may repeat.
_PART = re.compile(r"\\[.d]|\[[\w.-]+\]|[\w.-]|[()|^$*+]")
_SPECIAL = re.compile(r"[^\w.-]")
# Parts that are followed for all modules of an adapter, in about 0.05 s. A pattern for each of 900 modules takes half.
MAX_WORK = 600_000


class NamePatternError(Exception):
    """The text is not a pattern, or following the patterns takes too long."""


class _Name:
    def __init__(self, text: str) -> None:
        self.text = text
        self.end = 1 << len(text)
        self.positions: dict[str, int] = {}  # positions of each character
        self.work = 0  # parts that were followed in this name
        for number, character in enumerate(text):
            self.positions[character] = self.positions.get(character, 0) | 1 << number


# Given positions in a name: those behind the part.
_Part = Callable[[_Name, int], int]


class NamePattern:
    """Matches at the end of a module's name, behind a dot, as in PEFT. NamePatternError for other texts."""

    def __init__(self, text: str) -> None:
        parts = _PART.findall(text)
        if len(text) > MAX_PATTERN or "".join(parts) != text:
            raise NamePatternError("the pattern is not made of names and simple wildcards")
        self._words, self._length = text.split("."), len(text)
        # Every name that the pattern matches ends so.
        self.tail = "" if _SPECIAL.search(text) else text.rpartition(".")[2]
        self._left = parts[::-1]
        try:
            self._follow = self._ways()
        except re.error as error:
            raise NamePatternError(f"it is not a pattern ({error})") from None
        if self._left:
            raise NamePatternError("it is not a pattern (a bracket is not opened)")

    def matches(self, name: _Name) -> bool:
        if self.tail:
            return self._has_words(name)
        return bool(self._follow(name, 1 | name.positions.get(".", 0) << 1) & name.end)

    def _has_words(self, name: _Name) -> bool:
        """Whether the name ends with the pattern's words, and any characters between them."""
        name.work += 1
        start = len(name.text) - self._length
        if start < 0 or (start > 0 and name.text[start - 1] != "."):
            return False
        for word in self._words:
            if not name.text.startswith(word, start):
                return False
            start += len(word) + 1
        return True

    def _take(self, one_of: str) -> str:
        return self._left.pop() if self._left and self._left[-1] in one_of else ""

    def _ways(self) -> _Part:
        ways = [self._row()]
        while self._take("|"):
            ways.append(self._row())

        def any_way(name: _Name, at: int) -> int:
            found = 0
            for way in ways:
                found |= way(name, at)
            return found

        return any_way if len(ways) > 1 else ways[0]

    def _row(self) -> _Part:
        row = []
        while self._left and self._left[-1] not in "|)":
            row.append(self._one())

        def one_by_one(name: _Name, at: int) -> int:
            for part in row:
                if not at:
                    break
                name.work += 1
                at = part(name, at)
            return at

        return one_by_one

    def _one(self) -> _Part:
        match self._left.pop():
            case "(":
                inner = self._ways()
                if not self._take(")"):
                    raise NamePatternError("it is not a pattern (a bracket is not closed)")
                return inner
            case "^":
                return lambda _, at: at & 1
            case "$":
                return lambda name, at: at & name.end
            case "*" | "+" as repeat:
                raise NamePatternError(f"it is not a pattern (nothing is there for {repeat} to repeat)")
            case text:
                part = _character(text)
        repeat = self._take("*+")
        return _repeated(part, repeat == "+") if repeat else part


def _character(text: str) -> _Part:
    if text == ".":
        return lambda name, at: (at & (name.end - 1)) << 1
    if len(text) == 1:
        return lambda name, at: (at & name.positions.get(text, 0)) << 1
    one_of = re.compile(text)

    def any_of(name: _Name, at: int) -> int:
        found = 0
        for character, positions in name.positions.items():
            if at & positions and one_of.match(character):
                found |= at & positions
        return found << 1

    return any_of


def _repeated(part: _Part, once: bool) -> _Part:
    def repeated(name: _Name, at: int) -> int:
        found = part(name, at) if once else at
        while (more := found | part(name, found)) != found:
            name.work += 1
            found = more
        return found

    return repeated


class NamePatterns(Generic[V]):
    """Values of modules, by patterns of their names: the first pattern that matches counts."""

    def __init__(self, values: Iterable[tuple[str, V]] = ()) -> None:
        """NamePatternError for a text that is not a pattern."""
        self._values = [(NamePattern(text), value) for text, value in values]
        self._by_tail: dict[str, list[int]] = {}
        for number, (pattern, _) in enumerate(self._values):
            self._by_tail.setdefault(pattern.tail, []).append(number)
        self.work = 0

    def of(self, module: str, otherwise: V) -> V:
        """NamePatternError if this and all modules before take too long."""
        if not self._values:
            return otherwise
        name, found = _Name(module), otherwise
        candidates = (self._by_tail.get(module[start:], ()) for start in range(len(module) + 1))
        for number in sorted(number for numbers in candidates for number in numbers):
            pattern, value = self._values[number]
            if pattern.matches(name):
                found = value
                break
            if self.work + name.work > MAX_WORK:
                raise NamePatternError("following its patterns takes too long for the number of modules")
        self.work += name.work
        return found
