"""Divides a model's text into the answer, reasoning and calls of tools, while it is made."""

import re
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from text_generation_router.text.calls.found_calls import (
    BrokenCallError,
    FoundCalls,
    NotACallError,
    TextEndedError,
    Tools,
)
from text_generation_router.text.calls.source import FEWEST_CHARS, Markers, Source, Steps
from text_generation_router.text.calls.stepped_reader import SpecialTokens, SteppedReader


class CallBody(Protocol):
    """Reads what stands between the markers of calls."""

    def read(self, source: Source, calls: FoundCalls, is_marked: bool) -> Steps[None]:
        """Reads the calls that follow. NotACallError where the text is none; what is complete by then is given, and
        what has been read since `Source.hold` is text.

        `is_marked`: a marker precedes. Without one, only tools of the request can be called.
        """
        ...


class Marks:
    """What is looked for, in each place of a text."""

    def __init__(
        self,
        body: CallBody | None,
        thinks: tuple[Sequence[str], Sequence[str]] = ((), ()),
        starts: Sequence[str] = (),
        call_begin: str = "",
        ends: Sequence[str] = (),
        separators: Sequence[str] = (),
        frames: Sequence[tuple[str, str]] = (),
        bare_begins: Sequence[str] = (),
    ) -> None:
        """`thinks`: the markers that begin and that end reasoning. `starts`: of calls; `call_begin` is one of them and
        stands after each of the others. `ends`, `separators`: what may stand after calls, and between them.
        `frames`: what may stand around the answer. `bare_begins`: what stands before the name of a call without a
        marker, without white space."""
        self.body, self.separators, self.bare_begins = body, separators, bare_begins
        self.bare_starts = frozenset(begin[0] for begin in bare_begins)
        self.call_begin = call_begin
        self.begins, self.ends = thinks
        self.frames = tuple(begin for begin, _ in frames)
        self.at_start = (*self.begins, *starts, *self.frames)
        self.after_call = tuple(dict.fromkeys((*self.at_start, *ends, *self.ends)))
        self.in_reasoning = Markers((*starts, *self.ends))
        # An answer may speak of reasoning's markers. Where only a special token can be one, it is one everywhere.
        self.in_text = Markers((*starts, *(begin for begin in self.begins if len(begin) == 1)))
        self.in_frame = Markers((*self.in_text.texts, *(end for _, end in frames)))


class _Place(Enum):
    """What has been read last."""

    NOTHING = 1
    REASONING = 2
    CALL = 3
    TEXT = 4  # here no reasoning and no call can begin without a marker
    END = 5


class AnswerReader(SteppedReader):
    def __init__(
        self, marks: Marks, special_tokens: SpecialTokens, tools: Tools, is_open: bool, keeps_special: bool
    ) -> None:
        """`is_open`: the text begins within reasoning. `keeps_special`: texts have those of special tokens."""
        self._marks, self._is_open = marks, is_open
        self._is_framed = False  # the answer's own text has begun with a frame's marker
        super().__init__(special_tokens, tools, keeps_special)

    def _may_be_call(self, undecided: str) -> bool:
        """A text without a marker, which may be an answer in JSON, has to agree with a call of one of the tools."""
        if undecided[:1] not in self._marks.bare_starts:
            return True
        said = re.sub(r"\s", "", undecided)
        openings = (begin + name for begin in self._marks.bare_begins for name in self._calls.names)
        is_long = len(said) >= FEWEST_CHARS or self._calls.count > 0
        return is_long and any(said.startswith(text) or text.startswith(said) for text in openings)

    def _read(self) -> Steps[None]:
        place = (yield from self._reasoning()) if self._is_open else _Place.NOTHING
        while place is not _Place.END:
            place = yield from (self._text() if place is _Place.TEXT else self._next(place))

    def _next(self, place: _Place) -> Steps[_Place]:
        """Reads on from a place where reasoning and calls may begin."""
        source, marks = self._source, self._marks
        space = yield from source.spaces()
        if place is _Place.CALL and (separator := (yield from source.match(marks.separators))):
            space += separator + (yield from source.spaces())
        looked_for = marks.after_call if place is _Place.CALL else marks.at_start
        found = yield from source.match(looked_for)
        if found in marks.begins:
            return (yield from self._reasoning())
        if found in marks.frames:
            self._is_framed = True
            return _Place.TEXT
        if found and found not in marks.at_start:
            return _Place.CALL
        if not found and place is _Place.CALL and source.ends_within(looked_for):
            return _Place.END
        return (yield from self._call_or_text(found, self._kept(space, place), is_all=place is _Place.NOTHING))

    def _call_or_text(self, found: str, space: str, is_all: bool) -> Steps[_Place]:
        """Reads a call, after its marker `found` or without one; if there is none, the beginning of text. `space` is
        the white space before it. `is_all`: nothing else precedes."""
        first = "" if found else (yield from self._source.peek())
        if found or first in self._marks.bare_starts:
            was_call, rest = yield from self._call(found)
            if was_call and not rest:
                return _Place.CALL
            self._give_text(rest if was_call else space + rest)
            return _Place.TEXT
        if first or is_all:
            self._give_text(space)
        return _Place.TEXT if first else _Place.END

    def _kept(self, space: str, place: _Place) -> str:
        """The white space before a text. Line breaks after reasoning belong to its marker."""
        return space.lstrip("\n") if place is _Place.REASONING else space

    def _text(self) -> Steps[_Place]:
        """Reads text of the answer."""
        source, marks = self._source, self._marks
        looked_for = marks.in_frame if self._is_framed else marks.in_text
        while (yield from source.copy_until(looked_for, self._give_text)):
            found = yield from source.match(tuple(looked_for.texts))
            if found in marks.begins:
                return (yield from self._reasoning())
            if found not in marks.in_text.texts:
                self._is_framed = False
                return _Place.CALL
            was_call, rest = yield from self._call(found)
            self._give_text(rest)
            if was_call and not rest:
                return _Place.CALL
        return _Place.END

    def _reasoning(self) -> Steps[_Place]:
        """Reads reasoning after its marker. A call ends it too. A line break divides it from reasoning before."""
        source, marks = self._source, self._marks
        if self._has_reasoned:
            self._line_breaks.append("\n")
        self._give_reasoning((yield from source.spaces()).lstrip("\n"))
        while (yield from source.copy_until(marks.in_reasoning, self._give_reasoning)):
            found = yield from source.match(tuple(marks.in_reasoning.texts))
            was_call, rest = (False, "") if found in marks.ends else (yield from self._call(found))
            if found in marks.ends or was_call:
                self._line_breaks.clear()
                self._give_text(rest)
                return _Place.TEXT if rest else _Place.CALL if was_call else _Place.REASONING
            self._give_reasoning(rest)
        self._cut_reasoning()
        return _Place.END

    def _call(self, begin: str) -> Steps[tuple[bool, str]]:
        """Reads calls after the marker `begin`, or bare ones. Returns whether there was any, and what is text."""
        source, calls, marks = self._source, self._calls, self._marks
        assert marks.body is not None
        before = calls.count
        source.hold(begin)
        try:
            if begin and marks.call_begin not in ("", begin):
                yield from source.spaces()
                yield from source.expect(marks.call_begin)
            yield from source.spaces()
            yield from marks.body.read(source, calls, is_marked=bool(begin))
            rest = ""
        except BrokenCallError:
            rest = ""
        except TextEndedError:
            rest = source.release()
            if calls.count > before and calls.is_complete and not rest.strip(" \t\r\n,])}"):
                rest = ""  # the end of a call that is complete
        except NotACallError:
            rest = source.release()
        source.release()
        return calls.count > before, rest
