"""Reads the small files of a model. A model is somebody else's data: what is not a regular file, or larger than such a
file ever is, is refused before it is read. Launcher, router and server read through here."""

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

MIB = 2**20
# By file name. The largest in use: 34 MB for a tokenizer.json, 15 MB for an index, 1.2 MB for a tokenizer_config.json.
LIMITS_MIB: Mapping[str, int] = {
    "tokenizer.json": 256,
    "model.safetensors.index.json": 32,
    "pytorch_model.bin.index.json": 32,
    # What a tokenizer.json can be made from.
    "tokenizer.model": 64,
    "spiece.model": 64,
    "sentencepiece.bpe.model": 64,
    "vocab.json": 64,
    "merges.txt": 64,
    "vocab.txt": 64,
}
LIMIT_MIB = 8


def limit_bytes(name: str) -> int:
    return LIMITS_MIB.get(name, LIMIT_MIB) * MIB


def read_model_file(path: Path) -> bytes:
    """OSError, with a `strerror` that says why, for what cannot be read, is not a regular file, or is too large."""
    limit = limit_bytes(path.name)
    with open(path, "rb", buffering=0, opener=_open_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = bytearray()
        # Some file systems report no sizes: what is read counts as well.
        while max(status.st_size, len(content)) <= limit and (piece := file.read(MIB)):
            content += piece
    if max(status.st_size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit // MIB} MiB", str(path))
    return bytes(content)


def _open_without_waiting(path: str, flags: int) -> int:
    """Opening a named pipe would otherwise wait until somebody writes into it."""
    return os.open(path, flags | os.O_NONBLOCK)
