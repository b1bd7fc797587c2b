"""Calls that are JSON objects with a name and arguments, alone or in a list."""

import json
import re
from typing import Any

from text_generation_router.text.calls.errors import BrokenCallError, NotACallError
from text_generation_router.text.calls.formats import BodyKind, CallFormat
from text_generation_router.text.calls.found_calls import MAX_ARGUMENT_CHARS, MAX_NAME_CHARS, FoundCalls
from text_generation_router.text.calls.json_scan import JsonScanner
from text_generation_router.text.calls.source import Markers, Source, Steps

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
