"""Reads the small files of a model for launcher, router and server.

These files come from strangers. So a file that is not regular, or larger than any such file in use, is refused before
it is read.
"""

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

MIB = 2**20
# Largest size by file name. Sizes in use: tokenizer.json up to 34 MB, an index up to 15 MB, tokenizer_config.json up to
# 1.2 MB.
LIMITS_MIB: Mapping[str, int] = {
    "tokenizer.json": 256,
    "model.safetensors.index.json": 32,
    "pytorch_model.bin.index.json": 32,
    # Files from which a tokenizer.json can be made.
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
    """The file's content. OSError, whose `strerror` gives the reason, if the file cannot be read, is not regular, or is
    too large.
    """
    limit = limit_bytes(path.name)
    with open(path, "rb", buffering=0, opener=_open_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = bytearray()
        # Some file systems report the size 0, so the bytes read are counted as well.
        while max(status.st_size, len(content)) <= limit and (piece := file.read(MIB)):
            content += piece
    if max(status.st_size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit // MIB} MiB", str(path))
    return bytes(content)


def _open_without_waiting(path: str, flags: int) -> int:
    """Opens a file with O_NONBLOCK. Without it, opening a named pipe would wait until a process writes to the pipe."""
    return os.open(path, flags | os.O_NONBLOCK)
