"""Calls written as Python would write them, with literals as arguments: [weather(city="Rome"), clock()]."""

import json
import re

from text_generation_router.text.calls.errors import NotACallError
from text_generation_router.text.calls.formats import BodyKind, CallFormat
from text_generation_router.text.calls.found_calls import MAX_NAME_CHARS, FoundCalls
from text_generation_router.text.calls.python_scan import PythonScanner
from text_generation_router.text.calls.source import Source, Steps

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
