"""Calls whose arguments stand between tags as raw text. Their types come from the tool's JSON schema."""

import json
import re
from collections.abc import Mapping
from typing import Any

from text_generation_router.text.calls.errors import NotACallError, TextEndedError, TooMuchError
from text_generation_router.text.calls.formats import CallFormat
from text_generation_router.text.calls.found_calls import MAX_NAME_CHARS, FoundCalls
from text_generation_router.text.calls.source import Markers, Source, Steps
from text_generation_router.text.calls.typed_values import STRING_ONLY, json_of, types_of

# Surrogates stand for special tokens.
_NAME = re.compile(r"[^\s<>\"\ud800-\udfff]+")
_KEY = re.compile(r"[^\n<>\"\ud800-\udfff]+")


class XmlBody:
    def __init__(self, syntax: CallFormat) -> None:
        assert syntax.xml is not None
        self._xml, self._ends = syntax.xml, syntax.ends
        self._after_value = Markers((self._xml.after_value,))

    def read(self, source: Source, calls: FoundCalls, is_marked: bool) -> Steps[None]:
        xml = self._xml
        name = yield from source.run(_NAME, MAX_NAME_CHARS)
        if xml.after_name:
            yield from source.expect(xml.after_name)
        if not name:
            raise NotACallError
        looked_for = tuple(dict.fromkeys((xml.before_key, xml.end, *self._ends)))
        properties = calls.schema(name).get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        is_first = True
        while True:
            yield from source.spaces()
            found = yield from source.match(looked_for)
            if not found and not (yield from source.peek()):
                raise TextEndedError
            if not found:
                raise NotACallError
            key = "" if found != xml.before_key else (yield from self._key(source))
            if is_first:
                calls.start(name)
            source.release()
            if found != xml.before_key:
                calls.arguments("{}" if is_first else "}")
                calls.complete()
                return
            calls.arguments(("{" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            is_first = False
            yield from self._value(source, calls, properties.get(key))
            source.hold()

    def _key(self, source: Source) -> Steps[str]:
        xml = self._xml
        key = yield from source.run(_KEY, MAX_NAME_CHARS)
        yield from source.expect(xml.after_key)
        if xml.before_value:
            yield from source.spaces()
            yield from source.expect(xml.before_value)
        return key.strip()

    def _value(self, source: Source, calls: FoundCalls, schema: Any) -> Steps[None]:
        types = types_of(schema)
        kind = _Streamed if types == STRING_ONLY else _Collected
        value = kind(calls, self._xml.is_framed, types)
        if not (yield from source.copy_until(self._after_value, value.give)):
            value.cut()
            raise TextEndedError
        yield from source.expect(self._xml.after_value)
        value.end()


class _Streamed:
    """A string: its text is given as it comes, without the line breaks that frame it."""

    def __init__(self, calls: FoundCalls, is_framed: bool, types: frozenset[str]) -> None:
        self._calls, self._is_framed = calls, is_framed
        self._has_begun = False
        self._line_break = ""  # at the end of the text until now

    def give(self, text: str) -> None:
        opening = "" if self._has_begun else '"'
        if self._is_framed and not self._has_begun:
            text = text.removeprefix("\n")
        self._has_begun = True
        if self._is_framed:
            text = self._line_break + text
            self._line_break = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if opening or text:
            self._calls.arguments(opening + json.dumps(text, ensure_ascii=False)[1:-1])

    def cut(self) -> None:
        if self._line_break:
            self._calls.arguments("\\n")

    def end(self) -> None:
        self._calls.arguments('"' if self._has_begun else '""')


class _Collected:
    """A value of another type: it is given when it is complete."""

    def __init__(self, calls: FoundCalls, is_framed: bool, types: frozenset[str]) -> None:
        self._calls, self._is_framed, self._types = calls, is_framed, types
        self._parts: list[str] = []
        self._size = 0

    def give(self, text: str) -> None:
        self._parts.append(text)
        self._size += len(text)
        if self._size > self._calls.chars_left:
            raise TooMuchError("".join(self._parts))

    def cut(self) -> None:
        self._calls.arguments("".join(self._parts))

    def end(self) -> None:
        text = "".join(self._parts)
        if self._is_framed:
            text = text.removeprefix("\n").removesuffix("\n")
        self._calls.arguments(json_of(text, self._types))
