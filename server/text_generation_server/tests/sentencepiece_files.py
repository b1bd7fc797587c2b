"""Writes sentencepiece models (tokenizer.model) for tests."""

import math
import struct
from collections.abc import Sequence
from typing import Any

from text_generation_common.gguf.vocabulary import TokenKind

SPECIAL = [("<unk>", 0.0, TokenKind.UNKNOWN), ("<s>", 0.0, TokenKind.CONTROL), ("</s>", 0.0, TokenKind.CONTROL)]
BYTES = [(f"<0x{byte:02X}>", 0.0, TokenKind.BYTE) for byte in range(256)]
ALGORITHMS = {"unigram": 1, "bpe": 2, "word": 3}
Pieces = Sequence[tuple[str, float, TokenKind]]


def varint(number: int) -> bytes:
    number %= 2**64
    groups = [number >> shift & 127 for shift in range(0, max(1, number.bit_length()), 7)]
    return bytes([group | 128 for group in groups[:-1]] + groups[-1:])


def message(*fields: tuple[int, Any]) -> bytes:
    """A protocol buffer of whole numbers, floats, texts and other messages."""
    content = b""
    for number, value in fields:
        if isinstance(value, int):
            content += varint(number << 3) + varint(value)
        elif isinstance(value, float):
            content += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            data = value.encode() if isinstance(value, str) else value
            content += varint(number << 3 | 2) + varint(len(data)) + data
    return content


def model_file(
    pieces: Pieces,
    algorithm: str,
    byte_fallback: bool = False,
    trainer: Sequence[tuple[int, Any]] = (),
    normalizer: Sequence[tuple[int, Any]] = (),
) -> bytes:
    settings = message((1, "corpus.txt"), (3, ALGORITHMS[algorithm]), (35, int(byte_fallback)), (43, -1), *trainer)
    written = [(1, message((1, text), (2, score), (3, int(kind)))) for text, score, kind in pieces]
    return message(*written, (2, settings), (3, message((1, "identity"), *normalizer)))


def scored(texts: Sequence[str]) -> list[tuple[str, float, TokenKind]]:
    """No sum of some scores is equal to a sum of others, so that the best cut is the only one."""
    return [(text, -3.0 - math.sqrt(2 + i), TokenKind.NORMAL) for i, text in enumerate(texts)]


def byte_pieces(size: int) -> bytes:
    """A model in the layout of Llama 2 with `size` pieces: all bytes, some letters, and pairs of letters."""
    letters = "▁etaoinshrdlu"
    pairs = [first + second for first in letters for second in letters if first != second]
    texts = [*pairs[: size - len(SPECIAL) - len(BYTES) - len(letters)], *letters]
    return model_file([*SPECIAL, *BYTES, *scored(texts)], "bpe", byte_fallback=True, normalizer=[(4, 0)])
