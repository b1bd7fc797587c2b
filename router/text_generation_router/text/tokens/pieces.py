"""What an answer consists of besides plain text: reasoning and calls of tools. A reader finds them in the model's text
while it is made.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from text_generation_router.text.tokens.events import FinishReason, TokenEvent


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning, which comes before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins; `CallArguments` of the same index follow."""

    index: int  # 0 for the answer's first call
    name: str
    id: str | None = None  # as the model has written it; None: the format has no ids


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments. All parts together are one JSON object."""

    index: int
    text: str


Piece = Text | Reasoning | CallStart | CallArguments


class NewestCall:
    """The newest call of an answer whose pieces are still coming."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self._arguments: list[str] | None = None  # None: there is no call
        self.add(pieces)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, CallStart):
                self._arguments = []
            elif isinstance(piece, CallArguments) and self._arguments is not None:
                self._arguments.append(piece.text)

    @property
    def is_whole(self) -> bool:
        """Whether there is a call, and all of its arguments."""
        return self._arguments is not None and is_json("".join(self._arguments))


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class PieceReader(Protocol):
    """Divides one text into pieces. The pieces do not depend on how the text is divided into pushes."""

    def push(self, text: str, special: bool = False) -> Sequence[Piece]:
        """The pieces that are certain with the next part of the text. `special`: the part ends with the text of a
        special token, which no text that the model spells out can imitate."""
        ...

    def finish(self, is_cut: bool = False) -> Sequence[Piece]:
        """The pieces that were held back, when no more text follows. `is_cut`: something other than the model has ended
        the text. The beginning of a call or a marker, with which it ends, is left out then."""
        ...


class Filtered:
    """Leaves out some of the pieces that another reader finds."""

    def __init__(self, reader: PieceReader, is_kept: Callable[[Piece], bool]) -> None:
        self._reader = reader
        self._is_kept = is_kept

    def push(self, text: str, special: bool = False) -> Sequence[Piece]:
        return [*filter(self._is_kept, self._reader.push(text, special))]

    def finish(self, is_cut: bool = False) -> Sequence[Piece]:
        return [*filter(self._is_kept, self._reader.finish(is_cut))]


def is_of_answer(piece: Piece) -> bool:
    return not isinstance(piece, Reasoning)


def is_no_later_call(piece: Piece) -> bool:
    return not isinstance(piece, CallStart | CallArguments) or piece.index == 0


def read(reader: PieceReader, event: TokenEvent) -> list[Piece]:
    """The pieces (text, reasoning, calls) that `event` completes, of a text that is divided at the special tokens in
    `TextRules.markers`."""
    pieces = [piece for part in event.parts for piece in reader.push(part.text, part.special)]
    if event.finish is None:
        return pieces
    return [*pieces, *reader.finish(is_cut=event.finish.reason is not FinishReason.EOS_TOKEN)]


def merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The pieces of a whole text: neighbours of one kind, and all arguments of one call, become one piece."""
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if isinstance(last, Text) and isinstance(piece, Text):
            whole[-1] = Text(last.text + piece.text)
        elif isinstance(last, Reasoning) and isinstance(piece, Reasoning):
            whole[-1] = Reasoning(last.text + piece.text)
        elif isinstance(last, CallArguments) and isinstance(piece, CallArguments) and last.index == piece.index:
            whole[-1] = CallArguments(last.index, last.text + piece.text)
        else:
            whole.append(piece)
    return tuple(whole)
