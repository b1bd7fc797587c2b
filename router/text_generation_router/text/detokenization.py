"""Token ids to text, one at a time: whole characters only, stop strings found wherever they begin and end."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer

from text_generation_router.text.token_bytes import TokenBytes

# A character that is not complete has at most this many bytes.
MAX_OPEN_BYTES = 3


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer, and what is known about single ids."""

    tokenizer: Tokenizer
    token_bytes: TokenBytes
    special_ids: frozenset[int]
    eos_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> "Vocabulary":
        added = tokenizer.get_added_tokens_decoder()
        special_ids = frozenset(i for i, token in added.items() if token.special)
        return cls(tokenizer, TokenBytes(tokenizer), special_ids, frozenset(eos_ids))

    def text_of(self, token_id: int) -> str:
        """A token by itself; special ones keep their text."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


class Piece(NamedTuple):
    """What one token adds."""

    shown: str  # with the text of a special token
    plain: str  # without it: the pieces' plain texts add up to the generated text
    stopped: bool  # a stop string is complete


def decode_utf8(data: bytes) -> tuple[str, bytes]:
    """(the text of all that is complete, the bytes of a last character that is not)."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    rest = data[used:]
    if rest[:1] == b"\xed" and rest[1:] >= b"\xa0":
        # Python waits for the third byte of a surrogate, which is not UTF-8 whatever comes.
        return text + "\N{REPLACEMENT CHARACTER}" * len(rest), b""
    return text, rest


class TextStream:
    """The growing text of one request.

    The text is utf8(bytes of the prompt + bytes of the output) without the characters that are complete in the prompt;
    bytes that are not UTF-8 become U+FFFD as in Python's "replace". A character that the prompt begins and the output
    completes is therefore given out once, whole, and no other character of the prompt is.

    A special token has no bytes. It ends the character before it: what is held back becomes U+FFFD (or nothing, where
    all of it is the prompt's), then comes the special token's own text, which is in `Piece.shown` alone. The shown
    pieces without the special tokens' texts are the plain pieces, and those, with what `flush` returns, are `text`.
    Stop strings are looked for in what is shown.
    """

    def __init__(self, vocabulary: Vocabulary, input_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._tail = ""  # the end of the text given out, in which a stop string may have begun
        self._plain: list[str] = []
        ordinary = (i for i in reversed(input_ids) if i not in vocabulary.special_ids)
        self._previous = next(ordinary, None)  # the last token that is not special
        self._has_bytes = False  # whether a token of the output has added any
        _, self._open = decode_utf8(self._last_bytes(input_ids))  # bytes of a character that is not complete

    def push(self, token_id: int) -> Piece:
        """Its texts are "" while a character is incomplete."""
        if token_id in self._vocabulary.special_ids:
            plain = self._held_back()
            shown = plain + self._vocabulary.text_of(token_id)
        else:
            data = self._vocabulary.token_bytes.of(token_id, self._previous)
            self._previous = token_id
            self._has_bytes = self._has_bytes or bool(data)
            plain, self._open = decode_utf8(self._open + data)
            shown = plain
        stopped = False
        if self._stop and shown:
            shown, stopped = self._find_stop(shown)
            plain = plain[: len(shown)]
        self._plain.append(plain)
        return Piece(shown, plain, stopped)

    def flush(self) -> str:
        """The text that is still held back: bytes of a character that will not be completed."""
        text = self._held_back()
        self._plain.append(text)
        return text

    def text(self) -> str:
        """All that has been given out, without special tokens, up to the end of the stop string."""
        return "".join(self._plain)

    def _held_back(self) -> str:
        text = self._open.decode("utf-8", "replace") if self._has_bytes else ""
        self._open = b""
        return text

    def _last_bytes(self, input_ids: Sequence[int]) -> bytes:
        """Of the prompt, enough to hold a character that it leaves incomplete."""
        data = b""
        for token_id in reversed(input_ids):
            if len(data) >= MAX_OPEN_BYTES or token_id in self._vocabulary.special_ids:
                break
            data = self._vocabulary.token_bytes.of(token_id, token_id) + data
        return data[-MAX_OPEN_BYTES:]

    def _find_stop(self, text: str) -> tuple[str, bool]:
        searched = self._tail + text
        ends = [found + len(stop) for stop in self._stop if (found := searched.find(stop)) >= 0]
        if not ends:
            self._tail = searched[-self._longest_stop :]
            return text, False
        return searched[len(self._tail) : min(ends)], True
