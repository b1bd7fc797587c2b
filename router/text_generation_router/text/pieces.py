"""What an answer consists of besides plain text: reasoning and calls of tools. A reader finds them in the model's text
while it is made.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from text_generation_router.text.events import TokenEvent


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model has written for itself before its answer."""

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


class PieceReader(Protocol):
    """Divides one text into pieces. The pieces do not depend on how the text is divided into pushes."""

    def push(self, text: str, special: bool = False) -> Sequence[Piece]:
        """The pieces that are certain with the next part of the text. `special`: the part ends with the text of a
        special token, which no text that the model spells out can imitate."""
        ...

    def finish(self) -> Sequence[Piece]:
        """The pieces that were held back, when no more text follows."""
        ...


class WithoutReasoning:
    """Leaves out the reasoning that another reader finds."""

    def __init__(self, reader: PieceReader) -> None:
        self._reader = reader

    def push(self, text: str, special: bool = False) -> Sequence[Piece]:
        return [piece for piece in self._reader.push(text, special) if not isinstance(piece, Reasoning)]

    def finish(self) -> Sequence[Piece]:
        return [piece for piece in self._reader.finish() if not isinstance(piece, Reasoning)]


class FirstCall:
    """Leaves out all calls but the first that another reader finds."""

    def __init__(self, reader: PieceReader) -> None:
        self._reader = reader

    def push(self, text: str, special: bool = False) -> Sequence[Piece]:
        return [piece for piece in self._reader.push(text, special) if not _is_later_call(piece)]

    def finish(self) -> Sequence[Piece]:
        return [piece for piece in self._reader.finish() if not _is_later_call(piece)]


def _is_later_call(piece: Piece) -> bool:
    return isinstance(piece, CallStart | CallArguments) and piece.index > 0


def read(reader: PieceReader, event: TokenEvent) -> list[Piece]:
    """The pieces that are certain with an event of a text that has markers (`TextRules`)."""
    pieces = [piece for part in event.parts for piece in reader.push(part.text, part.special)]
    return pieces if event.finish is None else [*pieces, *reader.finish()]


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
