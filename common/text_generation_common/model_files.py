"""Reads the small files of a model for launcher, router and server.

These files come from strangers. So a file that is not regular, or larger than any such file in use, is refused before
it is read.
"""

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


class ModelFileError(Exception):
    """A file of a model cannot be used. The text is one line: the file, why it cannot be used, and what to do."""


class MissingFileError(ModelFileError):
    """The model has no such file."""


def limit_bytes(name: str) -> int:
    return LIMITS_MIB.get(name, LIMIT_MIB) * MIB


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file's content. Raises ModelFileError like `read_model_file`, and if the content is not an object."""
    try:
        content = json.loads(read_model_file(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON ({error}): repair it, or download it again") from None
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} does not hold a JSON object: repair it, or download it again")
    return content


def find_json_object(path: Path) -> dict[str, Any] | None:
    """Like `read_json_object`, but returns None if there is no such file."""
    try:
        return read_json_object(path)
    except MissingFileError:
        return None


def read_model_file(path: Path) -> bytes:
    """The file's content. Raises MissingFileError if there is no such file, and ModelFileError if the file cannot be
    read, is not regular, or is too large.
    """
    try:
        return _read(path)
    except FileNotFoundError:
        raise MissingFileError(f"{path.parent} has no {path.name}: is it the directory of a model?") from None
    except OSError as error:
        reason = error.strerror or error
        raise ModelFileError(f"{path} cannot be read ({reason}): repair it, or download it again") from None


def _read(path: Path) -> bytes:
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
