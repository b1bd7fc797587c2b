"""Calls whose arguments stand between tags as raw text. Their types come from the tool's JSON schema."""

import json
import re
from collections.abc import Mapping
from typing import Any

from text_generation_router.text.calls.formats import CallFormat
from text_generation_router.text.calls.found_calls import (
    MAX_NAME_CHARS,
    FoundCalls,
    NotACallError,
    TextEndedError,
    TooMuchError,
)
from text_generation_router.text.calls.source import Markers, Source, Steps
from text_generation_router.text.calls.typed_values import STRING_ONLY, json_of, types_of
from text_generation_router.text.schema_references import resolved

# Surrogates stand for special tokens.
_NAME = re.compile(r"[^\s<>\"\ud800-\udfff]+")
_KEY = re.compile(r"[^\n<>\"\ud800-\udfff]+")


class XmlBody:
    def __init__(self, syntax: CallFormat) -> None:
        assert syntax.xml is not None
        self._xml = syntax.xml
        self._looked_for = tuple(dict.fromkeys((self._xml.before_key, self._xml.end, *syntax.ends)))
        self._after_text = Markers((*self._looked_for, *syntax.starts))
        self._after_value = Markers((self._xml.after_value,))

    def read(self, source: Source, calls: FoundCalls, is_marked: bool) -> Steps[None]:
        xml = self._xml
        name = yield from source.run(_NAME, MAX_NAME_CHARS)
        if xml.after_name:
            yield from source.expect(xml.after_name)
        if not name:
            raise NotACallError
        yield from source.spaces()
        found = yield from source.match(self._looked_for)
        if not found:
            raise NotACallError if (yield from source.peek()) else TextEndedError
        key = "" if found != xml.before_key else (yield from self._key(source))
        calls.start(name)
        source.release()
        others: list[str] = []
        try:
            yield from self._arguments(source, calls, key if found == xml.before_key else None, others)
        finally:
            calls.give_text("".join(others))

    def _arguments(self, source: Source, calls: FoundCalls, key: str | None, others: list[str]) -> Steps[None]:
        """Reads the values, the first one's key having been read, up to the call's end. `others` gets text that stands
        between arguments: it belongs to the answer, and is given after the call."""
        schema, between = calls.schema(calls.name), ""
        calls.arguments("{")
        while key is not None:
            calls.arguments(between + json.dumps(key, ensure_ascii=False) + ": ")
            between = ", "
            yield from self._value(source, calls, self._types(schema, key))
            source.hold()
            yield from source.spaces()
            found = yield from source.match(self._looked_for)
            if not found:
                source.release()
                found = yield from self._find(source, others)
                source.hold(found)
            key = (yield from self._key(source)) if found == self._xml.before_key else None
            source.release()
        calls.arguments("}")
        calls.complete()

    def _find(self, source: Source, others: list[str]) -> Steps[str]:
        """Reads up to the next argument or the call's end. "": another call follows."""
        if not (yield from source.copy_until(self._after_text, others.append)):
            raise TextEndedError
        return (yield from source.match(self._looked_for))

    def _types(self, schema: Mapping[str, Any], key: str) -> frozenset[str]:
        """The types that an argument may have. As in other servers, one that the schema does not have is a string."""
        whole = resolved(dict(schema), schema)
        properties = whole.get("properties") if isinstance(whole, Mapping) else None
        if not isinstance(properties, Mapping) or key not in properties:
            return STRING_ONLY
        return types_of(properties[key], dict(schema))

    def _key(self, source: Source) -> Steps[str]:
        xml = self._xml
        key = yield from source.run(_KEY, MAX_NAME_CHARS)
        yield from source.expect(xml.after_key)
        if xml.before_value:
            yield from source.spaces()
            yield from source.expect(xml.before_value)
        return key.strip()

    def _value(self, source: Source, calls: FoundCalls, types: frozenset[str]) -> Steps[None]:
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
