"""Reads a sentencepiece model (tokenizer.model): its pieces, and what it does to a text before it looks for them.

The file is a protocol buffer. Its fields have the numbers of sentencepiece_model.proto, of the sentencepiece project.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from text_generation_common.errors import WeightsError
from text_generation_common.gguf.vocabulary import TokenKind

PIECES, TRAINER, NORMALIZER = 1, 2, 3  # fields of the model
TEXT, SCORE, KIND = 1, 2, 3  # fields of a piece
# Fields of the trainer's and the normalizer's settings, with the defaults of fields that a file leaves out.
TRAINER_FIELDS: Mapping[str, tuple[int, Any]] = {
    "algorithm": (3, 1), "whitespace_is_suffix": (24, 0), "byte_fallback": (35, 0), "bos_id": (41, 1),
    "eos_id": (42, 2),
}  # fmt: skip
NORMALIZER_FIELDS: Mapping[str, tuple[int, Any]] = {
    "charsmap": (2, b""), "add_dummy_prefix": (3, 1), "remove_extra_whitespaces": (4, 1), "escape_whitespaces": (5, 1),
}  # fmt: skip


class Algorithm(IntEnum):
    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True, slots=True)
class SentencePiece:
    text: str  # with U+2581 for each space
    score: float
    kind: TokenKind


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """A sentencepiece model. The id of a piece is its place."""

    pieces: tuple[SentencePiece, ...]
    algorithm: Algorithm
    whitespace_is_suffix: bool
    byte_fallback: bool  # a character without a piece becomes the pieces of its bytes in UTF-8
    bos_id: int  # -1: there is no such piece
    eos_id: int
    charsmap: bytes  # which characters the normalizer replaces by others; empty: none
    add_dummy_prefix: bool  # a text begins with a further space
    remove_extra_whitespaces: bool
    escape_whitespaces: bool

    def text(self, id: int) -> str | None:
        return self.pieces[id].text if 0 <= id < len(self.pieces) else None

    def of_kind(self, kind: TokenKind) -> list[SentencePiece]:
        return [piece for piece in self.pieces if piece.kind is kind]


def read_sentencepieces(content: bytes, where: str) -> SentencePieces:
    """WeightsError, which begins with `where`, for a content that is not a sentencepiece model."""
    try:
        found = _read(content)
        if len({piece.text for piece in found.pieces}) < len(found.pieces):
            raise ValueError("two pieces are the same")
        if not found.of_kind(TokenKind.UNKNOWN):
            raise ValueError("no piece stands for what is unknown")
    except (ValueError, LookupError, TypeError, struct.error) as error:
        raise WeightsError(f"{where} is not a sentencepiece model ({error}): download it again") from None
    return found


def _read(content: bytes) -> SentencePieces:
    pieces, settings = [], dict[str, Any]()
    tables = {TRAINER: TRAINER_FIELDS, NORMALIZER: NORMALIZER_FIELDS}
    for table in tables.values():
        settings |= {name: default for name, (_, default) in table.items()}
    for number, value in _fields(content):
        if number == PIECES:
            pieces.append(_piece(value))
        elif number in tables:
            own = {field: name for name, (field, _) in tables[number].items()}
            settings |= {own[field]: content for field, content in _fields(value) if field in own}
    algorithm, charsmap = Algorithm(settings.pop("algorithm")), _bytes(settings.pop("charsmap"))
    bos_id, eos_id = (_signed(settings.pop(name)) for name in ("bos_id", "eos_id"))
    flags = {name: bool(value) for name, value in settings.items()}
    return SentencePieces(tuple(pieces), algorithm, bos_id=bos_id, eos_id=eos_id, charsmap=charsmap, **flags)


def _piece(content: Any) -> SentencePiece:
    fields = dict(_fields(content))
    (score,) = struct.unpack("<f", fields.get(SCORE, bytes(4)))
    if not math.isfinite(score):
        raise ValueError("the score of a piece is not a number")
    kind = TokenKind(fields.get(KIND, TokenKind.NORMAL))
    if kind is TokenKind.UNDEFINED:
        raise ValueError("a piece is of no kind")
    return SentencePiece(_bytes(fields[TEXT]).decode(), score, kind)


def _bytes(value: Any) -> bytes:
    """The value of a field of text, of bytes or of a message. ValueError for a number, of which `bytes` would make as
    many zeros."""
    if not isinstance(value, bytes):
        raise ValueError("a field has another type")
    return value


def _fields(value: Any) -> Iterator[tuple[int, Any]]:
    """The fields of a message: (number of the field, a whole number or bytes)."""
    content, place = _bytes(value), 0
    while place < len(content):
        key, place = _varint(content, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(content, place)
            yield key >> 3, value
            continue
        sizes = {1: 8, 5: 4}
        size, place = _varint(content, place) if kind == 2 else (sizes.get(kind, -1), place)
        if not 0 <= size <= len(content) - place:
            raise ValueError("a field is cut off")
        yield key >> 3, content[place : place + size]
        place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """A whole number, 7 bits in each byte from the lowest, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = content[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("a number is too long")


def _signed(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError("a field has another type")
    return value - 2**64 if value >= 2**63 else value
