"""What all readers of an answer share: text goes in, pieces come out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from text_generation_router.text.calls.errors import TooMuchError
from text_generation_router.text.calls.found_calls import FoundCalls, Tools
from text_generation_router.text.calls.source import Markers, Source, Steps
from text_generation_router.text.calls.special_tokens import SpecialTokens
from text_generation_router.text.tokens.pieces import Piece, Reasoning, Text

_NO_MARKERS = Markers(())


class SteppedReader(ABC):
    """A `PieceReader`. It never raises. Each character comes out as text, as reasoning or in a call, or belongs to the
    markers and the syntax of reasoning and calls."""

    def __init__(self, special_tokens: SpecialTokens, tools: Tools, keeps_special: bool) -> None:
        """`keeps_special`: texts have those of special tokens."""
        self._special_tokens, self._keeps_special = special_tokens, keeps_special
        self._source = Source()
        self._pieces: list[Piece] = []
        self._calls = FoundCalls(self._pieces.append, self._give_text, tools, self._decode)
        self._line_breaks: list[str] = []  # at the end of the reasoning until now
        self._has_reasoned = False
        self._steps = self._read_within_bounds()
        next(self._steps, None)

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Reads the whole text."""

    @property
    def work(self) -> int:
        """Number of characters looked at."""
        return self._source.work

    @property
    def left_out(self) -> Sequence[str]:
        """What calls, and headers of messages, say that no piece has a place for."""
        return self._calls.left_out

    def push(self, text: str, special: bool = False) -> Sequence[Piece]:
        self._source.add(self._special_tokens.encode(text, special, self._keeps_special))
        return self._advance()

    def finish(self, is_cut: bool = False) -> Sequence[Piece]:
        if is_cut and (undecided := self._source.undecided) is not None and self._may_be_call(undecided):
            return ()
        self._source.end(is_cut)
        return self._advance()

    def _may_be_call(self, undecided: str) -> bool:
        """Whether a text that has been cut off would go on as a call. `undecided`: how far it has come."""
        return True

    def _advance(self) -> Sequence[Piece]:
        next(self._steps, None)
        pieces = tuple(self._pieces)
        self._pieces.clear()
        return pieces

    def _read_within_bounds(self) -> Steps[None]:
        try:
            yield from self._read()
        except TooMuchError as error:
            self._give_text(self._source.release() + error.rest)
            yield from self._source.copy_until(_NO_MARKERS, self._give_text)

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
            self._has_reasoned = True
            self._pieces.append(Reasoning("".join(self._line_breaks) + kept))
            self._line_breaks.clear()
        if len(kept) < len(text):
            self._line_breaks.append(text[len(kept) :])

    def _cut_reasoning(self) -> None:
        """The text ends within reasoning."""
        self._pieces += map(Reasoning, self._line_breaks)
