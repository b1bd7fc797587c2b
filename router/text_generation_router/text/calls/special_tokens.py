"""Special tokens within a reader's text, where no text that a model spells out can imitate them.

A special token that is a marker is one character of the surrogates' range, which no decoded text contains. Markers
that the tokenizer has no special token for are looked for as text.
"""

import re
from collections.abc import Iterable

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
