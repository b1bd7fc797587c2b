"""Writes GGUF files for tests: float32, or blocks that the test has."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from text_generation_common.gguf.container import ARRAY, KINDS, MAGIC, TEXT
from text_generation_common.gguf.types import TYPES

ALIGNMENT = 32
NUMBER_OF = {type.name: number for number, type in TYPES.items()}
NAME_OF = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def written(kind: int, value: Any) -> bytes:
    """`value` of an array: (kind of its elements, elements)."""
    if kind == TEXT:
        return text(value)
    if kind == ARRAY:
        inner, elements = value
        return struct.pack("<IQ", inner, len(elements)) + b"".join(written(inner, element) for element in elements)
    return struct.pack(f"<{KINDS[kind]}", value)


def header(keys: Mapping[str, Any], entries: list[tuple[str, list[int], int, int]], version: int = 3) -> bytes:
    """`keys`: (kind, value) by name. `entries`: name, shape, number of the type and offset of each tensor."""
    parts = [MAGIC, struct.pack("<IQQ", version, len(entries), len(keys))]
    parts += [text(name) + struct.pack("<I", kind) + written(kind, value) for name, (kind, value) in keys.items()]
    for name, shape, number, offset in entries:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts.append(text(name) + sizes + struct.pack("<IQ", number, offset))
    return b"".join(parts)


def write_gguf(
    path: Path, keys: Mapping[str, Any], tensors: Mapping[str, Tensor | tuple[str, list[int], bytes]]
) -> None:
    """A tensor may be (type, shape, bytes)."""
    entries, data = [], bytearray()
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            stored = tensor.contiguous()
            tensor = NAME_OF[stored.dtype], list(stored.shape), stored.view(torch.uint8).numpy().tobytes()
        kind, shape, content = tensor
        data += bytes(-len(data) % ALIGNMENT)
        entries.append((name, shape, NUMBER_OF[kind], len(data)))
        data += content
    start = header(keys, entries)
    path.write_bytes(start + bytes(-len(start) % ALIGNMENT) + data + bytes(-len(data) % ALIGNMENT))
