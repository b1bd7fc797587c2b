"""Headers of GGUF files with small tokenizers, for tests."""

import struct
from pathlib import Path
from typing import Any

from text_generation_common.gguf.container import KINDS, LENGTH, TEXT, GgufArray, GgufHeader

BYTE, WHOLE, FLOAT, FLAG = 0, 5, 6, 7  # kinds of elements
# Kinds of tokens, and a small sentencepiece model.
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTES = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
FIRST = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
RAW_BYTES = [(f"<0x{byte:02X}>", 0.0, BYTES) for byte in range(256)]
WORDS = [(SPACE + "ab", -1.0, NORMAL), ("ab", -2.0, NORMAL), (SPACE + "a", -3.0, NORMAL)]
LETTERS = [(letter, -10.0 - place, NORMAL) for place, letter in enumerate(["a", "b", SPACE])]
PIECES = [*FIRST, *RAW_BYTES, *WORDS, *LETTERS]


def array(kind: int, values: list[Any]) -> GgufArray:
    if kind == TEXT:
        data = b"".join(LENGTH.pack(len(text.encode())) + text.encode() for text in values)
    else:
        data = struct.pack(f"<{len(values)}{KINDS[kind]}", *values)
    return GgufArray(kind, len(values), len(data), data, 0)


def header(**keys: Any) -> GgufHeader:
    """A file with `tokenizer.ggml.` keys; a name with `__` is a whole key, with dots in the place of `__`."""
    named = {name.replace("__", ".") if "__" in name else f"tokenizer.ggml.{name}": keys[name] for name in keys}
    metadata = {name: value for name, value in named.items() if value is not None}
    return GgufHeader(Path("m.gguf"), (Path("m.gguf"),), metadata, {})


def sentencepiece(pieces: list[tuple[str, float, int]], **keys: Any) -> GgufHeader:
    return header(model="llama", **_pieces(pieces), **keys)


def unigram(pieces: list[tuple[str, float, int]], **keys: Any) -> GgufHeader:
    return header(model="t5", **_pieces(pieces), **keys)


def byte_level(texts: list[str], merges: list[str], splitting: str | None = "gpt-2", **keys: Any) -> GgufHeader:
    lists = {"tokens": array(TEXT, texts), "merges": array(TEXT, merges)}
    return header(**{"model": "gpt2", "pre": splitting, **lists, **keys})


def _pieces(pieces: list[tuple[str, float, int]]) -> dict[str, GgufArray]:
    texts, scores, kinds = map(list, zip(*pieces, strict=True))
    return {"tokens": array(TEXT, texts), "scores": array(FLOAT, scores), "token_type": array(WHOLE, kinds)}
