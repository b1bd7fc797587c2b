"""Calls written as Python would write them, with literals as arguments: [weather(city="Rome"), clock()]."""

import json
import math
import re
from enum import Enum

from text_generation_router.text.calls.formats import BodyKind, CallFormat
from text_generation_router.text.calls.found_calls import MAX_NAME_CHARS, FoundCalls, NotACallError
from text_generation_router.text.calls.source import Source, Steps

# Follows one Python literal while it is made, and writes it as JSON. Nothing is evaluated.

_SPACES = re.compile(r"[ \t\r\n]*")
# Surrogates stand for special tokens, which no string contains.
_STRING = re.compile(r"[^\"'\\\x00-\x1f\ud800-\udfff]*")
_WORD = re.compile(r"[-+._0-9A-Za-z]*")
_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9]*|[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+|[0-9]+[eE][-+]?[0-9]+)")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "n": "\\n",
    "t": "\\t",
    "r": "\\r",
    "b": "\\b",
    "f": "\\f",
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
    "\\": "\\\\",
    '"': '\\"',
    "'": "'",
    "\n": "",
}
_NUM_HEX = {"x": 2, "u": 4, "U": 8}
_LONGEST_WORD = 1000  # characters of a number


class _Awaits(Enum):
    VALUE = 1
    VALUE_OR_END = 2  # after [, and after a comma in a list
    KEY_OR_END = 3  # after {, and after a comma in a dict
    COLON = 4
    COMMA_OR_END = 5


class PythonScanner:
    """As `JsonScanner`: strings, numbers, True, False, None, lists, and dicts with strings as keys."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._open: list[str] = []  # the brackets that close what is open
        self._expects = _Awaits.VALUE
        self._quote = ""  # the quote that ends the string that is being read
        self._escape: str | None = None  # what has been read of an escape
        self._word: str | None = None  # what has been read of a number or a constant
        self._comma = ""  # is given with the value that follows it

    @property
    def rest(self) -> str:
        """The beginning of a number or a constant, which is given when it is complete."""
        return self._word or ""

    def scan(self, text: str, at: int, end: int, parts: list[str]) -> int:
        """Reads `text` from `at`, at most up to `end`. Returns where it stopped: at `end`, after the value's last
        character, or before a character that cannot belong to it. `parts` gets JSON text."""
        while at < end and not self.is_done and not self.is_broken:
            if self._escape is not None:
                at = self._read_escape(text[at], at, parts)
            elif self._quote:
                at = self._read_string(text, at, end, parts)
            elif self._word is not None:
                at = self._read_word(text, at, end, parts)
            else:
                found = _SPACES.match(text, at, end)
                assert found is not None
                at = found.end()
                if at < end:
                    at = self._structure(text[at], at, parts)
        return at

    def _read_string(self, text: str, at: int, end: int, parts: list[str]) -> int:
        found = _STRING.match(text, at, end)
        assert found is not None
        parts.append(found.group())
        at = found.end()
        if at == end:
            return at
        character = text[at]
        if character == self._quote:
            parts.append('"')
            self._quote = ""
            self._end_value(is_key=self._expects is _Awaits.KEY_OR_END)
        elif character == "\\":
            self._escape = ""
        elif character in "\"'" or character < " ":
            parts.append(json.dumps(character)[1:-1])
        else:
            self.is_broken = True
            return at
        return at + 1

    def _read_escape(self, character: str, at: int, parts: list[str]) -> int:
        assert self._escape is not None
        self._escape += character
        kind, digits = self._escape[0], self._escape[1:]
        if kind in _NUM_HEX and all(digit in "0123456789abcdefABCDEF" for digit in digits):
            if len(digits) < _NUM_HEX[kind]:
                return at + 1
            code = int(digits, 16)
            if code > 0x10FFFF:
                self.is_broken = True
                return at
            parts.append(json.dumps(chr(code))[1:-1])
        elif kind in _NUM_HEX or "\ud800" <= character <= "\udfff":
            self.is_broken = True
            return at
        else:  # as in Python, a backslash before any other character is one
            parts.append(_ESCAPES.get(kind) if kind in _ESCAPES else json.dumps("\\" + kind, ensure_ascii=False)[1:-1])  # type: ignore[arg-type]
        self._escape = None
        return at + 1

    def _read_word(self, text: str, at: int, end: int, parts: list[str]) -> int:
        assert self._word is not None
        found = _WORD.match(text, at, min(end, at + _LONGEST_WORD + 1 - len(self._word)))
        assert found is not None
        self._word += found.group()
        if found.end() < end or len(self._word) > _LONGEST_WORD:
            if (value := _word_as_json(self._word)) is None:
                self.is_broken = True
                parts.append(self._word)
            else:
                parts.append(value)
                self._end_value(is_key=False)
            self._word = None
        return found.end()

    def _structure(self, character: str, at: int, parts: list[str]) -> int:
        expects = self._expects
        if expects is _Awaits.COLON and character == ":":
            parts.append(": ")
            self._expects = _Awaits.VALUE
        elif expects is _Awaits.COMMA_OR_END and character == ",":
            self._comma = ", "
            self._expects = _Awaits.KEY_OR_END if self._open[-1] == "}" else _Awaits.VALUE_OR_END
        elif self._open and character == self._open[-1] and expects not in (_Awaits.VALUE, _Awaits.COLON):
            parts.append(self._open.pop())
            self._comma = ""
            self._end_value(is_key=False)
        elif expects in (_Awaits.VALUE, _Awaits.VALUE_OR_END) or (expects is _Awaits.KEY_OR_END and character in "\"'"):
            return self._begin_value(character, at, parts)
        else:
            self.is_broken = True
            return at
        return at + 1

    def _begin_value(self, character: str, at: int, parts: list[str]) -> int:
        """Reads the first character of a value, or of a key."""
        if character in "\"'":
            self._quote = character
            parts.append(self._comma + '"')
        elif character in "{[":
            self._open.append("}" if character == "{" else "]")
            self._expects = _Awaits.KEY_OR_END if character == "{" else _Awaits.VALUE_OR_END
            parts.append(self._comma + character)
        elif character in "-+." or (character.isascii() and character.isalnum()):
            self._word = ""
            parts.append(self._comma)
            at -= 1
        else:
            self.is_broken = True
            return at
        self._comma = ""
        return at + 1

    def _end_value(self, is_key: bool) -> None:
        if is_key:
            self._expects = _Awaits.COLON
        elif self._open:
            self._expects = _Awaits.COMMA_OR_END
        else:
            self.is_done = True


def _word_as_json(word: str) -> str | None:
    """A number or a constant as JSON; None if it is neither."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if len(word) > _LONGEST_WORD or not _NUMBER.fullmatch(word):
        return None
    if word.lstrip("-+").isdigit():
        return word.removeprefix("+")
    number = float(word)
    if math.isfinite(number):
        return repr(number)
    return word if _JSON_NUMBER.fullmatch(word) else None  # larger than any float: JSON has such numbers


_NAME = re.compile(r"[\w.-]+")
_KEY = re.compile(r"\w+")


class PythonicBody:
    def __init__(self, syntax: CallFormat) -> None:
        self._needs_list = syntax.body is BodyKind.PYTHONIC

    def read(self, source: Source, calls: FoundCalls, is_marked: bool) -> Steps[None]:
        """A call that has begun keeps incomplete arguments if they are not literals: what follows is text."""
        is_list = bool((yield from source.match(("[",))))
        if self._needs_list and not is_list:
            raise NotACallError
        while True:
            yield from source.spaces()
            yield from self._call(source, calls, is_marked)
            yield from source.spaces()
            if is_list and not (yield from source.match((",",))):
                yield from source.expect("]")
                return
            if not is_list and not _KEY.match((yield from source.peek())):
                return

    def _call(self, source: Source, calls: FoundCalls, is_marked: bool) -> Steps[None]:
        name = yield from source.run(_NAME, MAX_NAME_CHARS)
        if not name or not (is_marked or name in calls.names):
            raise NotACallError
        yield from source.expect("(")
        yield from source.spaces()
        opening = "{"
        while not (yield from source.match((")",))):
            key = yield from source.run(_KEY, MAX_NAME_CHARS)
            yield from source.spaces()
            yield from source.expect("=")
            if not key:
                raise NotACallError
            if opening == "{":
                calls.start(name)
            source.release()
            calls.arguments(opening + json.dumps(key, ensure_ascii=False) + ": ")
            opening = ", "
            yield from self._value(source, calls)
            yield from source.spaces()
            if not (yield from source.match((",",))):
                yield from source.expect(")")
                break
            yield from source.spaces()
        if opening == "{":
            calls.start(name)
        calls.arguments("{}" if opening == "{" else "}")
        calls.complete()
        source.hold()

    def _value(self, source: Source, calls: FoundCalls) -> Steps[None]:
        if not (yield from source.follow(PythonScanner(), calls.arguments)):
            raise NotACallError
        source.hold()
