"""What all readers of an answer share: special tokens as single characters; text goes in, pieces come out."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from text_generation_router.text.calls.found_calls import FoundCalls, Tools, TooMuchError
from text_generation_router.text.calls.source import Markers, Source, Steps
from text_generation_router.text.tokens.pieces import Piece, Reasoning, Text

# Special tokens within a reader's text, where no text that a model spells out can imitate them.
#
# A special token that is a marker is one character of the surrogates' range, which no decoded text contains. Markers
# that the tokenizer has no special token for are looked for as text.

_FIRST_CODE = 0xD800
_MAX_CODES = 0x800
_SURROGATE = re.compile("[\ud800-\udfff]")


class SpecialTokens:
    def __init__(self, texts: frozenset[str], markers: Iterable[str]) -> None:
        """`texts`: of the tokenizer's special tokens. `markers`: what readers look for."""
        self._texts = texts
        self._longest = max(map(len, texts), default=0)
        known = sorted({text for text in texts if text and any(text in marker for marker in markers)}, key=len)
        self._codes = {text: chr(_FIRST_CODE + i) for i, text in enumerate(known[-_MAX_CODES:])}
        self._decoded = {code: text for text, code in self._codes.items()}

    @property
    def has_markers(self) -> bool:
        """Whether a marker is a special token."""
        return bool(self._codes)

    def coded(self, marker: str) -> str:
        """A marker as it is in a reader's text."""
        for text in sorted(self._codes, key=len, reverse=True):
            marker = marker.replace(text, self._codes[text])
        return marker

    def encode(self, text: str, special: bool, keeps_special: bool) -> str:
        """A part of the model's text as a reader reads it. `special`: it ends with a special token's text.
        `keeps_special`: whether the texts of special tokens that are not markers remain."""
        ending = self._ending(text) if special else ""
        plain = text[: len(text) - len(ending)]
        if not plain.isascii():
            plain = _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", plain)
        if not ending:
            return plain
        return plain + (self._codes.get(ending) or (ending if keeps_special else ""))

    def decode(self, text: str, keeps_special: bool) -> str:
        """Text of the model's again. `keeps_special`: whether markers that are special tokens remain in it."""
        if not self._codes or text.isascii():
            return text
        return _SURROGATE.sub(lambda found: self._decoded[found.group()] if keeps_special else "", text)

    def _ending(self, text: str) -> str:
        """The longest special token's text with which `text` ends."""
        if text in self._texts:
            return text
        endings = (text[at:] for at in range(max(0, len(text) - self._longest), len(text)))
        return next((ending for ending in endings if ending in self._texts), "")


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
