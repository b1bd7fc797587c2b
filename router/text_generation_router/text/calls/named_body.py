"""Calls that are a name, a separator and the arguments as JSON."""

import re

from text_generation_router.text.calls.formats import CallFormat, IdStyle
from text_generation_router.text.calls.found_calls import MAX_NAME_CHARS, FoundCalls, NotACallError
from text_generation_router.text.calls.json_body import give_arguments
from text_generation_router.text.calls.source import Markers, Source, Steps

# Surrogates stand for special tokens.
_NAME = re.compile(r"[^\s<>\[\]{}()\"'`\ud800-\udfff]+")
_COUNTED = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")


class NamedBody:
    def __init__(self, syntax: CallFormat) -> None:
        self._named = syntax.named
        self._is_counted = syntax.ids is IdStyle.COUNTED
        self._ends = syntax.ends
        self._after_broken = Markers((*syntax.starts, *syntax.ends))

    def read(self, source: Source, calls: FoundCalls, is_marked: bool) -> Steps[None]:
        yield from self._optional(source, self._named.before)
        written = yield from source.run(_NAME, MAX_NAME_CHARS)
        name, call_id = self._parts(written)
        yield from source.spaces()
        if (yield from self._optional(source, self._named.before_id)):
            call_id = yield from source.run(_NAME, MAX_NAME_CHARS)
            yield from source.spaces()
        is_named = yield from self._optional(source, self._named.after)
        yield from source.spaces()
        has_arguments = (yield from source.peek()) == "{"
        if not name or not (has_arguments or (is_named and (yield from source.match(self._ends)))):
            raise NotACallError
        calls.start(name, call_id)
        source.release()
        if not has_arguments:
            calls.arguments("{}")
            calls.complete()
            return
        yield from give_arguments(source, calls, self._after_broken)

    def _parts(self, written: str) -> tuple[str, str | None]:
        """The name of the tool, and the call's id if the name's text is one."""
        if not self._is_counted:
            return written, None
        found = _COUNTED.fullmatch(written)
        return (found[1], written) if found else ("", None)

    def _optional(self, source: Source, text: str) -> Steps[bool]:
        return bool(text) and bool((yield from source.match((text,))))
