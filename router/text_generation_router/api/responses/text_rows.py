"""Which tokens the text of an answer is made of, where the model's text has reasoning, calls and markers besides."""

from collections.abc import Sequence

from text_generation_router.api.common.generation import Row
from text_generation_router.text.tokens.pieces import Piece, Text


class TextRows:
    """Collects the tokens of one answer. A token whose text is held back waits for the token that decides about it."""

    def __init__(self, is_divided: bool = True) -> None:
        """`is_divided`: False: all tokens belong to the text."""
        self._is_divided = is_divided
        self._waiting: list[Row] = []

    def add(self, row: Row, pieces: Sequence[Piece]) -> list[Row]:
        """The tokens that the text among `pieces` is made of. `pieces`: what the token of `row` adds to the answer."""
        self._waiting.append(row)
        if not pieces:
            return []
        waiting, self._waiting = self._waiting, []
        return waiting[self._first(waiting, pieces) :] if self._is_divided else waiting

    def _first(self, waiting: Sequence[Row], pieces: Sequence[Piece]) -> int:
        """The first of the tokens that have made the text; those before it have made other pieces, or markers."""
        missing = sum(len(piece.text) for piece in pieces if isinstance(piece, Text))
        first = len(waiting)
        while first and missing > 0:
            first -= 1
            missing -= len(waiting[first][0].text)
        while 0 < first < len(waiting) and not waiting[first - 1][0].text:  # a character's first bytes
            first -= 1
        return first

    def rest(self) -> list[Row]:
        """The tokens that have added nothing, such as the one that ended the text."""
        return self._waiting


def rows_by_message(rows: Sequence[Row], event_pieces: Sequence[Sequence[Piece]]) -> list[list[Row]]:
    """The tokens of each part of an answer's text: calls and reasoning divide it into parts. `event_pieces`: what each
    token adds to the answer, and at last what its end adds, if that is not a token."""
    found, messages, is_open = TextRows(), list[list[Row]](), False
    for i, pieces in enumerate(event_pieces):
        told = found.add(rows[i], pieces) if i < len(rows) else []
        for piece in pieces:
            if isinstance(piece, Text):
                if not is_open:
                    messages.append([])
                messages[-1] += told
                told = []
            is_open = isinstance(piece, Text)
    if is_open or not messages:
        messages = messages or [[]]
        messages[-1] += found.rest()
    return messages
