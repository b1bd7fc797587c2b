"""The two files of an adapter as bytes, and their digest, which is the adapter's identity. Names are labels."""

import hashlib
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from text_generation_common.errors import ModelError

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PIECE = 2**20
MAX_BYTES = 2**34  # maximum size of a file
OPENED = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """Both files, each of one reading, so that none is swapped between its check and its use."""

    folder: Path
    digest: str
    config: bytes
    weights: bytes


def digest_of(folder: Path, inside: Collection[Path] = ()) -> str:
    """SHA-256 of both files. `inside`: see `_opened`."""
    refuse_pickle(folder)
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with _opened(folder / name, inside) as file:
            digest.update(_size(os.fstat(file.fileno()).st_size))
            while piece := file.read(PIECE):
                digest.update(piece)
    return digest.hexdigest()


def refuse_pickle(folder: Path) -> None:
    """ModelError if the folder has the weights as a pickle only."""
    if not (folder / WEIGHTS).exists() and (folder / PICKLE).exists():
        raise ModelError(f"{folder / PICKLE} is a pickle, which is not read: save the adapter as {WEIGHTS}")


def read_content(folder: Path, inside: Collection[Path] = ()) -> AdapterContent:
    digest, contents = hashlib.sha256(), []
    for name in (CONFIG, WEIGHTS):
        with _opened(folder / name, inside) as file:
            content = file.read()
        digest.update(_size(len(content)))
        digest.update(content)
        contents.append(content)
    return AdapterContent(folder, digest.hexdigest(), *contents)


def _size(count: int) -> bytes:
    return count.to_bytes(8, "little")


@contextmanager
def _opened(path: Path, inside: Collection[Path]) -> Iterator[BinaryIO]:
    """`inside`: real folders, in one of which the file must lie; none: anywhere. The open file is asked where it lies,
    so that a link which takes a checked file's place leads nowhere. ModelError if it cannot be read."""
    try:
        # A pipe in the file's place would keep the thread waiting without O_NONBLOCK.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(f"{path} is not a file")
            if status.st_size > MAX_BYTES:
                raise ModelError(f"{path} has {status.st_size} bytes, and at most {MAX_BYTES} are read")
            if inside and not any((OPENED / str(file.fileno())).readlink().is_relative_to(each) for each in inside):
                raise ModelError(f"{path} is a link to a file outside of the folders of --lora-dirs, and was refused")
            yield file
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
