"""Headers of GGUF files with small tokenizers, for tests."""

import struct
from pathlib import Path
from typing import Any

from text_generation_common.gguf.container import KINDS, LENGTH, TEXT, GgufArray, GgufHeader

BYTE, FLOAT, WHOLE = 0, 6, 5  # kinds of elements


def array(kind: int, values: list[Any]) -> GgufArray:
    if kind == TEXT:
        data = b"".join(LENGTH.pack(len(text.encode())) + text.encode() for text in values)
    else:
        data = struct.pack(f"<{len(values)}{KINDS[kind]}", *values)
    return GgufArray(kind, len(values), data, 0)


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
