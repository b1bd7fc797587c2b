"""Calls that are JSON objects with a name and arguments, alone or in a list."""

import json
import re
from enum import Enum
from typing import Any

from text_generation_router.text.calls.formats import BodyKind, CallFormat
from text_generation_router.text.calls.found_calls import (
    MAX_ARGUMENT_CHARS,
    MAX_NAME_CHARS,
    BrokenCallError,
    FoundCalls,
    NotACallError,
)
from text_generation_router.text.calls.source import Markers, Source, Steps

# Follows one JSON value while it is made, to find its end (RFC 8259). It neither recurses nor builds the value.

_SPACES = re.compile(r"[ \t\r\n]*")
# Surrogates stand for special tokens (see `SpecialTokens`), which no string contains.
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


_MAX_OTHER_CHARS = 16_384  # length of a member other than the name and the arguments


class JsonBody:
    def __init__(self, syntax: CallFormat) -> None:
        self._syntax = syntax
        self._after_broken = Markers((*syntax.starts, *syntax.ends))

    def read(self, source: Source, calls: FoundCalls, is_marked: bool) -> Steps[None]:
        """Reads the calls that follow. NotACallError where the text is none; calls before that are given.

        `is_marked`: a marker precedes. Without one, only a tool of the request is called, and an object with other
        members is text.
        """
        may_be_list = is_marked or self._syntax.body is BodyKind.JSON_ARRAY
        if not (may_be_list and (yield from source.match(("[",)))):
            yield from self._object(source, calls, is_marked)
            return
        while True:
            yield from source.spaces()
            yield from self._object(source, calls, is_marked)
            yield from source.spaces()
            if not (yield from source.match((",",))):
                yield from source.match(("]",))
                return

    def _object(self, source: Source, calls: FoundCalls, is_marked: bool) -> Steps[None]:
        call = _Call(source, calls, self._syntax, is_marked, self._after_broken)
        yield from source.expect("{")
        yield from source.spaces()
        while not (yield from source.match(("}",))):
            key = yield from _string(source)
            yield from source.spaces()
            yield from source.expect(":")
            yield from source.spaces()
            yield from call.member(key)
            yield from source.spaces()
            if not (yield from source.match((",",))):
                yield from source.expect("}")
                break
            yield from source.spaces()
        call.end()


class _Call:
    """One object: a call as soon as its name and the beginning of its arguments are known."""

    def __init__(
        self, source: Source, calls: FoundCalls, syntax: CallFormat, is_marked: bool, after_broken: Markers
    ) -> None:
        self._source, self._calls, self._syntax = source, calls, syntax
        self._is_marked, self._after_broken = is_marked, after_broken
        self._name: str | None = None
        self._id: str | None = None
        self._early: str | None = None  # arguments that stand before the name
        self._has_begun = False
        self._others: list[str] = []  # members that have no place in a `CallStart` or `CallArguments`

    def member(self, key: str) -> Steps[None]:
        """Reads the value of a member."""
        syntax = self._syntax
        if key == syntax.name_key and self._name is None:
            self._name = yield from _string(self._source)
            if not self._name or (not self._is_marked and self._name not in self._calls.names):
                raise NotACallError
            if self._early is not None:
                self._give_whole(self._early)
        elif key in syntax.arguments_keys and self._early is None and not self._has_begun:
            yield from self._arguments()
        elif key == syntax.id_key and not self._has_begun and (yield from self._source.peek()) == '"':
            self._id = yield from _string(self._source)
        elif self._is_marked or key in (syntax.id_key, "type"):
            parts: list[str] = []
            if not (yield from self._source.follow(JsonScanner(), parts.append, _MAX_OTHER_CHARS)):
                raise NotACallError
            self._others += (key, *parts)
        else:
            raise NotACallError

    def end(self) -> None:
        """The object is complete."""
        if not self._has_begun:
            if self._name is None or not self._is_marked:
                raise NotACallError
            self._give_whole("{}")
        self._leave_out_others()
        self._source.hold()

    def _leave_out_others(self) -> None:
        self._calls.leave_out(" ".join(self._others))
        self._others.clear()

    def _arguments(self) -> Steps[None]:
        if self._name is not None and (yield from self._source.peek()) == "{":
            self._begin()
            yield from give_arguments(self._source, self._calls, self._after_broken)
            return
        parts: list[str] = []
        if not (yield from self._source.follow(JsonScanner(), parts.append, MAX_ARGUMENT_CHARS)):
            raise NotACallError
        self._early = _object_text("".join(parts))
        if self._name is not None:
            self._give_whole(self._early)

    def _begin(self) -> None:
        assert self._name is not None
        self._calls.start(self._name, self._id)
        self._source.release()
        self._leave_out_others()
        self._has_begun = True

    def _give_whole(self, text: str) -> None:
        self._begin()
        self._calls.arguments(text)
        self._calls.complete()
        self._source.hold()


def give_arguments(source: Source, calls: FoundCalls, after_broken: Markers) -> Steps[None]:
    """Gives the JSON object that follows as the arguments of the call that has begun. From the first character that
    cannot belong to it, the model's own text goes on up to one of `after_broken`: then BrokenCallError."""
    if not (yield from source.follow(JsonScanner(), calls.arguments)):
        yield from source.copy_until(after_broken, calls.arguments)
        raise BrokenCallError
    calls.complete()
    source.hold()


def _object_text(text: str) -> str:
    """The arguments as a JSON object, if they are one, null, or a string that contains one."""
    text = text.strip()
    if text.startswith('"'):
        text = _decoded(text).strip()
        if not isinstance(_parsed(text), dict):
            raise NotACallError
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise NotACallError
    return text


def _string(source: Source) -> Steps[str]:
    """A JSON string of a name's length."""
    if (yield from source.peek()) != '"':
        raise NotACallError
    parts: list[str] = []
    if not (yield from source.follow(JsonScanner(), parts.append, 6 * MAX_NAME_CHARS + 2)):
        raise NotACallError
    return _decoded("".join(parts))


def _decoded(text: str) -> str:
    value = _parsed(text)
    if not isinstance(value, str):
        raise NotACallError
    # Half of a surrogate pair, which JSON can spell, is not text.
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", value)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotACallError from error
