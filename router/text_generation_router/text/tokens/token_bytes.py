"""The bytes that each token adds to a text. They are bytes, not characters, because a token may hold a part of a
character.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
from tokenizers import Tokenizer

from text_generation_router.text.tokens.length_bound import byte_symbols, flat_steps

BYTE_OF_SYMBOL = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecoderLayout:
    """A decoder that decodes every token independently; only the first token of a text may be treated differently."""

    byte_level: bool = False  # each character of a token stands for one byte, by GPT-2's table
    byte_fallback: bool = False  # the token <0x0A> stands for the byte 0x0A
    replacements: tuple[tuple[str, str], ...] = ()
    first_drops: str = ""  # Metaspace: a character that stands for a space; the first token of a text loses it
    # Strip: a character, and how many of it the first token of a text loses at its start.
    first_strips: tuple[str, int] = ("", 0)

    def bytes_of(self, token: str, is_first: bool) -> bytes:
        data = self._raw_bytes(token, is_first)
        character, count = self.first_strips if is_first else ("", 0)
        while count and data.startswith(character.encode()):
            data, count = data.removeprefix(character.encode()), count - 1
        return data

    def _raw_bytes(self, token: str, is_first: bool) -> bytes:
        if self.byte_level:
            return symbols_to_bytes(token)
        if self.byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self.first_drops:
            token = token.replace(self.first_drops, "" if is_first else " ")
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def symbols_to_bytes(token: str) -> bytes:
    """The bytes of a byte-level token. A token with a character that is not in the table stands for its own text, such
    as an added token with a space.
    """
    try:
        return bytes([BYTE_OF_SYMBOL[symbol] for symbol in token])
    except KeyError:
        return token.encode()


def read_layout(decoder: dict[str, Any] | None) -> DecoderLayout | None:
    """The layout of a decoder. `decoder`: the decoder's entry in tokenizer.json. Returns None if the decoder does not
    decode every token independently.
    """
    if decoder is None:
        return None
    steps = flat_steps(decoder, "decoders")
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return DecoderLayout(byte_level=True)
    values: dict[str, Any] = {"replacements": ()}
    is_fused = False
    for step in steps:
        match step:
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "ByteFallback"}:
                values["byte_fallback"] = True
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                values["replacements"] += ((pattern, content),)
            case {"type": "Strip", "content": content, "start": count, "stop": 0} if is_fused:
                values["first_strips"] = (content, count)
            case {"type": "Metaspace", "replacement": symbol, "prepend_scheme": "never"}:
                values["replacements"] += ((symbol, " "),)
            case {"type": "Metaspace", "replacement": symbol}:
                values["first_drops"] = symbol
            case _:
                return None
    return DecoderLayout(**values)


class TokenBytes:
    """A table of the bytes of a tokenizer's tokens, filled on demand."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        state = None if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
        self._layout = read_layout(None if state is None else orjson.loads(state))
        self._bytes: dict[int, bytes] = {}
        # Texts of tokens whose bytes are whole characters, whatever the token before is.
        self.whole_texts: dict[int, str] = {}

    def of(self, token_id: int, previous: int | None) -> bytes:
        """The bytes that a token adds after the token `previous` (None: the token is the text's first). Neither may be
        a special token. An id that the tokenizer does not know adds no bytes."""
        if previous is not None and (known := self._bytes.get(token_id)) is not None:
            return known
        if self._layout is None:
            return self._difference(token_id, previous)
        if previous is None:
            return self._layout.bytes_of(self._token(token_id), is_first=True)
        data = self._bytes[token_id] = self._layout.bytes_of(self._token(token_id), is_first=False)
        with suppress(UnicodeDecodeError):
            self.whole_texts[token_id] = data.decode()
        return data

    def _token(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def _difference(self, token_id: int, previous: int | None) -> bytes:
        """The bytes of a token after `previous`, for decoders whose output depends on the neighbouring token
        (WordPiece, an end-of-word suffix, spaces between all tokens). Their tokens never hold parts of characters.
        """
        before = "" if previous is None else self._decode([previous])
        both = before if previous is None else self._decode([previous, token_id])
        if previous is not None and both.startswith(before):
            return both[len(before) :].encode()
        return self._decode([token_id]).encode()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
