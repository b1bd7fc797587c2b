"""Follows one JSON value while it is made, to find its end (RFC 8259). It neither recurses nor builds the value."""

import re
from enum import Enum

_SPACES = re.compile(r"[ \t\r\n]*")
# Surrogates stand for special tokens (see special_tokens.py), which no string contains.
_STRING = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_IS_WORD = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SHORT_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_LONGEST_WORD = 1000  # characters of a number


class _Expects(Enum):
    VALUE = 1
    VALUE_OR_END = 2  # after [
    KEY = 3
    KEY_OR_END = 4  # after {
    COLON = 5
    COMMA_OR_END = 6


class _In(Enum):
    """What the next character is part of."""

    STRUCTURE = 1
    STRING = 2
    ESCAPE = 3
    HEX = 4
    WORD = 5


class JsonScanner:
    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False  # the next character cannot belong to the value
        self._open: list[str] = []  # the brackets that close what is open
        self._expects = _Expects.VALUE
        self._in = _In.STRUCTURE
        self._word = ""  # the number, true, false or null that is being read
        self._hex_left = 0

    @property
    def rest(self) -> str:
        """What has been read and not been given: nothing."""
        return ""

    def scan(self, text: str, at: int, end: int, parts: list[str]) -> int:
        """Reads `text` from `at`, at most up to `end`. Returns where it stopped: at `end`, after the value's last
        character, or before a character that cannot belong to the value.

        `parts` gets what was read, with control characters inside strings as escapes: models write line breaks there,
        which JSON does not allow.
        """
        begin = at
        while at < end and not self.is_done and not self.is_broken:
            if self._in is _In.STRING:
                found = _STRING.match(text, at, end)
                assert found is not None
                at = found.end()
                if at == end:
                    break
                if text[at] < " ":
                    parts += (text[begin:at], _escaped(text[at]))
                    begin = at + 1
                at = self._string_mark(text[at], at)
            elif self._in is _In.STRUCTURE:
                found = _SPACES.match(text, at, end)
                assert found is not None
                at = found.end()
                if at < end:
                    at = self._structure(text[at], at)
            elif self._in is _In.WORD:
                at = self._read_word(text, at, end)
            else:
                at = self._escape(text[at], at)
        parts.append(text[begin:at])
        return at

    def _string_mark(self, character: str, at: int) -> int:
        """Reads the character at which the ordinary characters of a string end."""
        if character == '"':
            self._in = _In.STRUCTURE
            if self._expects in (_Expects.KEY, _Expects.KEY_OR_END):
                self._expects = _Expects.COLON
            else:
                self._end_value()
        elif character == "\\":
            self._in = _In.ESCAPE
        elif character >= " ":
            self.is_broken = True
            return at
        return at + 1

    def _escape(self, character: str, at: int) -> int:
        if self._in is _In.HEX and character in _HEX:
            self._hex_left -= 1
            if not self._hex_left:
                self._in = _In.STRING
        elif self._in is _In.ESCAPE and character == "u":
            self._in, self._hex_left = _In.HEX, 4
        elif self._in is _In.ESCAPE and character in _SHORT_ESCAPES:
            self._in = _In.STRING
        else:
            self.is_broken = True
            return at
        return at + 1

    def _read_word(self, text: str, at: int, end: int) -> int:
        found = _WORD.match(text, at, min(end, at + _LONGEST_WORD + 1 - len(self._word)))
        assert found is not None
        self._word += found.group()
        if found.end() < end or len(self._word) > _LONGEST_WORD:
            self._in = _In.STRUCTURE
            if len(self._word) <= _LONGEST_WORD and _IS_WORD.fullmatch(self._word):
                self._end_value()
            else:
                self.is_broken = True
        return found.end()

    def _structure(self, character: str, at: int) -> int:
        expects = self._expects
        if expects is _Expects.COLON:
            self._accept(character == ":", _Expects.VALUE)
        elif expects is _Expects.COMMA_OR_END and character == ",":
            self._expects = _Expects.KEY if self._open[-1] == "}" else _Expects.VALUE
        elif character in "]}":
            closes = bool(self._open) and self._open[-1] == character
            if closes and expects not in (_Expects.VALUE, _Expects.KEY):
                self._open.pop()
                self._end_value()
            else:
                self.is_broken = True
        elif expects in (_Expects.KEY, _Expects.KEY_OR_END):
            self._accept(character == '"', expects)
            self._in = _In.STRING
        elif expects in (_Expects.VALUE, _Expects.VALUE_OR_END):
            return self._begin_value(character, at)
        else:
            self.is_broken = True
        return at if self.is_broken else at + 1

    def _begin_value(self, character: str, at: int) -> int:
        if character == '"':
            self._in = _In.STRING
        elif character == "{":
            self._open.append("}")
            self._expects = _Expects.KEY_OR_END
        elif character == "[":
            self._open.append("]")
            self._expects = _Expects.VALUE_OR_END
        elif character == "-" or (character.isascii() and character.isalnum()):
            self._in, self._word = _In.WORD, ""
            return at
        else:
            self.is_broken = True
            return at
        return at + 1

    def _accept(self, is_right: bool, then: _Expects) -> None:
        if is_right:
            self._expects = then
        else:
            self.is_broken = True

    def _end_value(self) -> None:
        if self._open:
            self._expects = _Expects.COMMA_OR_END
        else:
            self.is_done = True


def _escaped(character: str) -> str:
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character) or f"\\u{ord(character):04x}"
