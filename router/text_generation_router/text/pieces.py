"""What an answer consists of besides plain text: reasoning and calls of tools. A reader finds them in the model's text
while it is made.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Text(NamedTuple):
    """Text of the answer itself."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model has written for itself before its answer."""

    text: str


class CallStart(NamedTuple):
    """A call of a tool begins; `CallArguments` of the same index follow."""

    index: int  # type: ignore[assignment]  # 0 for the answer's first call
    name: str
    id: str | None = None  # as the model has written it; None: the format has no ids


class CallArguments(NamedTuple):
    """The next part of a call's arguments. All parts together are one JSON object."""

    index: int  # type: ignore[assignment]
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


class PlainReader:
    """Takes every text as the answer itself."""

    def push(self, text: str, special: bool = False) -> Sequence[Piece]:
        return (Text(text),) if text else ()

    def finish(self) -> Sequence[Piece]:
        return ()
