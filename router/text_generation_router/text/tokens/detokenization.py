"""Turns token ids into text, one id at a time. Returns whole characters only, and finds stop strings across tokens."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer

from text_generation_router.text.tokens.token_bytes import TokenBytes

# Most bytes of an incomplete UTF-8 character.
MAX_OPEN_BYTES = 3


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, and properties of single token ids that it computes."""

    tokenizer: Tokenizer
    token_bytes: TokenBytes
    special_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        added = tokenizer.get_added_tokens_decoder()
        special_ids = frozenset(i for i, token in added.items() if token.special)
        return cls(tokenizer, TokenBytes(tokenizer), special_ids)

    def text_of(self, token_id: int) -> str:
        """The text of a single token, special tokens included."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text that has begun; of a special token, those of its own text."""
        if token_id in self.special_ids:
            return self.text_of(token_id).encode()
        return self.token_bytes.of(token_id, token_id)


class Piece(NamedTuple):
    """The text that one token adds."""

    shown: str  # the text, including the text of a special token
    plain: str  # the text without special tokens: all plain texts joined are the generated text
    stopped: bool  # whether a stop string is complete


def decode_utf8(data: bytes) -> tuple[str, bytes]:
    """Splits bytes into (the text of all complete characters, the bytes of an incomplete last character)."""
    try:
        return data.decode(), b""  # most tokens end with a character
    except UnicodeDecodeError:
        return _decode_open(data)


def _decode_open(data: bytes) -> tuple[str, bytes]:
    text, used = codecs.utf_8_decode(data, "replace", False)
    if used == len(data):
        return text, b""
    rest = data[used:]
    if rest[:1] == b"\xed" and rest[1:] >= b"\xa0":
        # Python's decoder waits for the third byte of a surrogate. A surrogate is never valid UTF-8, so we do not wait.
        return text + "\N{REPLACEMENT CHARACTER}" * len(rest), b""
    return text, rest


class TextStream:
    """The growing text of one request.

    The text is utf8(bytes of the prompt + bytes of the output) without the characters that are complete in the prompt;
    bytes that are not UTF-8 become U+FFFD as in Python's "replace". So a character that begins in the prompt and is
    completed by the output is returned once, whole; no other character of the prompt is returned.

    A special token has no bytes. It ends an incomplete character before it: the bytes of that character become U+FFFD
    (or nothing, if all of them come from the prompt). Then follows the special token's own text, in `Piece.shown` only.
    `text` is all `Piece.plain` joined, plus the text returned by `flush`. Stop strings are searched for in the shown
    text.
    """

    def __init__(self, vocabulary: Vocabulary, input_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        self._special_ids = vocabulary.special_ids
        self._bytes_of = vocabulary.token_bytes.of
        self._whole_texts = vocabulary.token_bytes.whole_texts
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._tail = ""  # the last characters of the returned text, in which a stop string may begin
        self._plain: list[str] = []
        ordinary = (i for i in reversed(input_ids) if i not in vocabulary.special_ids)
        self._previous = next(ordinary, None)  # the latest token that is not special
        self._has_bytes = False  # whether the output has added bytes
        _, self._open = decode_utf8(self._last_bytes(input_ids))  # bytes of a last character that is incomplete

    def push(self, token_id: int, may_stop: bool = True) -> Piece:
        """Adds a token. The texts of the returned piece are "" while a character is incomplete. `may_stop`: whether a
        stop string that ends in the text of this token ends the text."""
        text = self._whole_texts.get(token_id)
        if text and not self._open and self._previous is not None and not self._stop:  # nearly every token
            self._previous = token_id
            self._has_bytes = True
            self._plain.append(text)
            return Piece(text, text, False)
        if token_id in self._special_ids:
            plain = self._held_back()
            shown = plain + self._vocabulary.text_of(token_id)
        else:
            data = self._bytes_of(token_id, self._previous)
            self._previous = token_id
            if data:
                self._has_bytes = True
            plain, self._open = decode_utf8(self._open + data)
            shown = plain
        stopped = False
        if self._stop and shown:
            shown, stopped = self._find_stop(shown, may_stop)
            plain = plain[: len(shown)]
        self._plain.append(plain)
        return Piece(shown, plain, stopped)

    def flush(self) -> str:
        """Ends the text. Returns the bytes of an incomplete character, which were held back until now, as text."""
        text = self._held_back()
        self._plain.append(text)
        return text

    def text(self) -> str:
        """The text returned until now, without special tokens, up to the end of the stop string."""
        return "".join(self._plain)

    def _held_back(self) -> str:
        text = self._open.decode("utf-8", "replace") if self._has_bytes else ""
        self._open = b""
        return text

    def _last_bytes(self, input_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt, enough for any character that the prompt leaves incomplete."""
        data = b""
        for token_id in reversed(input_ids):
            if len(data) >= MAX_OPEN_BYTES or token_id in self._vocabulary.special_ids:
                break
            data = self._vocabulary.token_bytes.of(token_id, token_id) + data
        return data[-MAX_OPEN_BYTES:]

    def _find_stop(self, text: str, may_stop: bool) -> tuple[str, bool]:
        searched, known = self._tail + text, len(self._tail)
        end = len(searched) + 1
        for stop in self._stop if may_stop else ():
            # The search begins where a stop string would end with the first new character.
            if (found := searched.find(stop, max(0, known + 1 - len(stop)))) >= 0:
                end = min(end, found + len(stop))
        if end > len(searched):
            self._tail = searched[-self._longest_stop :]
            return text, False
        return searched[len(self._tail) : end], True
