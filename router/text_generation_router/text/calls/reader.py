"""Divides a model's text into the answer, reasoning and calls of tools, while it is made."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from text_generation_router.text.calls.errors import BrokenCallError, NotACallError, TextEndedError, TooMuchError
from text_generation_router.text.calls.found_calls import FoundCalls, Tools
from text_generation_router.text.calls.source import Markers, Source, Steps
from text_generation_router.text.calls.special_tokens import SpecialTokens
from text_generation_router.text.pieces import Piece, Reasoning, Text

_NO_MARKERS = Markers(())


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
        thinks: tuple[str, str] | None,
        starts: Sequence[str] = (),
        ends: Sequence[str] = (),
        separators: Sequence[str] = (),
        bare_starts: str = "",
    ) -> None:
        """`thinks`: the markers that begin and end reasoning. `starts`: of calls. `ends`, `separators`: what may stand
        after calls, and between them. `bare_starts`: characters with which a call may begin without a marker."""
        self.body, self.separators, self.bare_starts = body, separators, bare_starts
        self.begin, self.end = thinks or ("", "")
        begin, end = filter(None, [self.begin]), filter(None, [self.end])
        self.at_start = (*begin, *starts)
        self.after_call = (*self.at_start, *ends, *end)
        self.in_reasoning = Markers((*starts, self.end))
        # An answer may speak of reasoning's marker. Where only a special token can be it, it is a marker everywhere.
        self.in_text = Markers((*starts, self.begin if len(self.begin) == 1 else ""))


class _Place(Enum):
    """What has been read last."""

    NOTHING = 1
    REASONING = 2
    CALL = 3
    TEXT = 4  # here no reasoning and no call can begin without a marker
    END = 5


class AnswerReader:
    """A `PieceReader`. It never raises. Each character comes out as text, as reasoning or in a call, or belongs to the
    markers and the syntax of reasoning and calls."""

    def __init__(
        self, marks: Marks, special_tokens: SpecialTokens, tools: Tools, is_open: bool, keeps_special: bool
    ) -> None:
        """`is_open`: the text begins within reasoning. `keeps_special`: texts have those of special tokens."""
        self._marks, self._special_tokens, self._keeps_special = marks, special_tokens, keeps_special
        self._source = Source()
        self._pieces: list[Piece] = []
        self._calls = FoundCalls(self._pieces.append, tools, self._decode)
        self._line_breaks: list[str] = []  # at the end of the reasoning until now
        self._steps = self._read(is_open)
        next(self._steps, None)

    @property
    def work(self) -> int:
        """Number of characters looked at."""
        return self._source.work

    @property
    def left_out(self) -> Sequence[str]:
        """Values in calls that no piece has a place for."""
        return self._calls.left_out

    def push(self, text: str, special: bool = False) -> Sequence[Piece]:
        self._source.add(self._special_tokens.encode(text, special, self._keeps_special))
        return self._advance()

    def finish(self) -> Sequence[Piece]:
        self._source.end()
        return self._advance()

    def _advance(self) -> Sequence[Piece]:
        next(self._steps, None)
        pieces = tuple(self._pieces)
        self._pieces.clear()
        return pieces

    def _decode(self, text: str) -> str:
        return self._special_tokens.decode(text, self._keeps_special)

    def _give_text(self, text: str) -> None:
        if text := self._decode(text):
            self._pieces.append(Text(text))

    def _give_reasoning(self, text: str) -> None:
        """Line breaks at the end of reasoning belong to its marker, as in the templates that write it."""
        text = self._decode(text)
        kept = text.rstrip("\n")
        if kept:
            self._pieces.append(Reasoning("".join(self._line_breaks) + kept))
            self._line_breaks.clear()
        if len(kept) < len(text):
            self._line_breaks.append(text[len(kept) :])

    def _read(self, is_open: bool) -> Steps[None]:
        try:
            place = (yield from self._reasoning()) if is_open else _Place.NOTHING
            while place is not _Place.END:
                place = yield from (self._text() if place is _Place.TEXT else self._next(place))
        except TooMuchError as error:
            self._give_text(self._source.release() + error.rest)
            yield from self._source.copy_until(_NO_MARKERS, self._give_text)

    def _next(self, place: _Place) -> Steps[_Place]:
        """Reads on from a place where reasoning and calls may begin."""
        source, marks = self._source, self._marks
        space = yield from source.spaces()
        if place is _Place.CALL and (separator := (yield from source.match(marks.separators))):
            space += separator + (yield from source.spaces())
        looked_for = marks.after_call if place is _Place.CALL else marks.at_start
        found = yield from source.match(looked_for)
        if not found and place is _Place.CALL and source.ends_within(looked_for):
            return _Place.END
        if found and found == marks.begin:
            return (yield from self._reasoning())
        if found and found not in marks.at_start:
            return _Place.CALL
        first = "" if found else (yield from source.peek())
        if found or (first and first in marks.bare_starts):
            was_call, rest = yield from self._call(found)
            if was_call and not rest:
                return _Place.CALL
            self._give_text(rest if was_call else self._kept(space, place) + rest)
            return _Place.TEXT
        if first or place is _Place.NOTHING:
            self._give_text(self._kept(space, place))
        return _Place.TEXT if first else _Place.END

    def _kept(self, space: str, place: _Place) -> str:
        """The white space before a text. Line breaks after reasoning belong to its marker."""
        return space.lstrip("\n") if place is _Place.REASONING else space

    def _text(self) -> Steps[_Place]:
        """Reads text of the answer."""
        source, marks = self._source, self._marks
        while (yield from source.copy_until(marks.in_text, self._give_text)):
            found = yield from source.match(tuple(marks.in_text.texts))
            if found == marks.begin:
                return (yield from self._reasoning())
            was_call, rest = yield from self._call(found)
            self._give_text(rest)
            if was_call and not rest:
                return _Place.CALL
        return _Place.END

    def _reasoning(self) -> Steps[_Place]:
        """Reads reasoning after its marker. A call ends it too."""
        source, marks = self._source, self._marks
        self._give_reasoning((yield from source.spaces()).lstrip("\n"))
        while (yield from source.copy_until(marks.in_reasoning, self._give_reasoning)):
            found = yield from source.match(tuple(marks.in_reasoning.texts))
            was_call, rest = (False, "") if found == marks.end else (yield from self._call(found))
            if found == marks.end or was_call:
                self._line_breaks.clear()
                self._give_text(rest)
                return _Place.TEXT if rest else _Place.CALL if was_call else _Place.REASONING
            self._give_reasoning(rest)
        self._pieces += map(Reasoning, self._line_breaks)
        return _Place.END

    def _call(self, begin: str) -> Steps[tuple[bool, str]]:
        """Reads calls after the marker `begin`, or bare ones. Returns whether there was any, and what is text."""
        source, calls, body = self._source, self._calls, self._marks.body
        assert body is not None
        before = calls.count
        source.hold(begin)
        try:
            yield from source.spaces()
            yield from body.read(source, calls, is_marked=bool(begin))
            rest = ""
        except BrokenCallError:
            rest = ""
        except TextEndedError:
            rest = source.release()
            if calls.count > before and calls.is_complete and not rest.strip(" \t\r\n,]}"):
                rest = ""  # the end of a call that is complete
        except NotACallError:
            rest = source.release()
        source.release()
        return calls.count > before, rest
