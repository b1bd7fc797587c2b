"""Token ids to text, one at a time: whole characters only, stop strings found wherever they begin and end."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# So much of the prompt stands before the first new token, so that tokenizers which drop a text's first space see that
# it is not the first.
CONTEXT_TOKENS = 5


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer, and what is known about single ids."""

    tokenizer: Tokenizer
    special_ids: frozenset[int]
    eos_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> "Vocabulary":
        added = tokenizer.get_added_tokens_decoder()
        return cls(tokenizer, frozenset(i for i, token in added.items() if token.special), frozenset(eos_ids))

    def text_of(self, token_id: int) -> str:
        """A token by itself; special ones keep their text."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


class TextStream:
    """The growing text of one request."""

    def __init__(self, vocabulary: Vocabulary, input_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        self._context = list(input_ids[-CONTEXT_TOKENS:])
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._ids: list[int] = []
        self._given = 0  # ids whose text has been given out
        self._tail = ""  # the end of the text given out, in which a stop string may have begun
        self._cut = ""  # what came after a stop string
        self._decoder = DecodeStream(self._context, skip_special_tokens=False)

    def push(self, token_id: int) -> tuple[str, bool]:
        """(text that this token adds, whether a stop string is complete). "" while a character is incomplete."""
        self._ids.append(token_id)
        try:
            text = self._decoder.step(self._vocabulary.tokenizer, token_id) or ""
        except Exception:
            # The decoder has lost its place over bytes that are no UTF-8. It raises its library's bare Exception.
            text = self._resume_decoding()
        if not text:
            return "", False
        self._given = len(self._ids)
        return self._find_stop(text)

    def flush(self) -> str:
        """The text that is still held back: bytes of a character that will not be completed."""
        text = self._decode(self._ids[self._given :])
        self._given = len(self._ids)
        return text

    def text(self) -> str:
        """All of it, without special tokens, up to the end of the stop string."""
        tokenizer = self._vocabulary.tokenizer
        before = tokenizer.decode(self._context, skip_special_tokens=True)
        whole = tokenizer.decode([*self._context, *self._ids], skip_special_tokens=True)
        if whole.startswith(before):
            text = whole[len(before) :]
        else:  # the prompt ended inside a character
            text = tokenizer.decode(self._ids, skip_special_tokens=True)
        return text.removesuffix(self._cut)

    def _find_stop(self, text: str) -> tuple[str, bool]:
        searched = self._tail + text
        ends = [found + len(stop) for stop in self._stop if (found := searched.find(stop)) >= 0]
        if not ends:
            self._tail = searched[-self._longest_stop :] if self._longest_stop else ""
            return text, False
        self._cut = searched[min(ends) :]
        return searched[len(self._tail) : min(ends)], True

    def _resume_decoding(self) -> str:
        text = self._decode(self._ids[self._given :])
        self._decoder = DecodeStream(self._ids[-CONTEXT_TOKENS:], skip_special_tokens=False)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._vocabulary.tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
