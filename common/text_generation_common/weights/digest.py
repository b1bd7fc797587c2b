"""A digest of what decides the tokens of a request: an engine goes on with another engine's requests only if both have
the same digest.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from text_generation_common.errors import WeightsError
from text_generation_common.file_names import SLOW_TOKENIZER_FILES
from text_generation_common.gguf.container import MAGIC, is_gguf
from text_generation_common.gguf.container import header_end as gguf_end
from text_generation_common.quantized.served import VERSIONS
from text_generation_common.weights.headers import file_names, format_of, weight_files

# To be raised with every change after which the same request may get other tokens: of a kernel, of the noise, of the
# order in which numbers are added.
NUMERICS_VERSION = 3
GGUF_VERSION = 1  # the same for the blocks of GGUF files
# Only the header and this many blocks of each weights file are read, so that a large folder takes milliseconds. A
# difference between two blocks is not noticed.
BLOCKS, BLOCK_BYTES = 16, 4096
# Files besides the weights that decide tokens. The templates of chats do not: a request is ids.
FILES = (
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
)


def model_digest(folder: Path, settings: Mapping[str, str], has_weights: bool = True) -> bytes:
    """32 bytes. `settings`: all that decides tokens besides the folder and this build's code, by name, such as the type
    of the numbers and the kernels. `has_weights`: False, if the weights do not come from the folder. WeightsError: the
    folder has no weights, or a file cannot be read.
    """
    digest = hashlib.sha256()

    def add(name: str, data: bytes) -> None:
        for part in (name.encode(), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)

    add("numerics version", str(NUMERICS_VERSION).encode())
    for name in sorted(settings):
        add(f"setting {name}", settings[name].encode())
    there = set(file_names(folder))
    if has_weights and (quantized := format_of(folder)) is not None:
        add(f"numerics version of {quantized}", str(VERSIONS[quantized]).encode())
    if has_weights and is_gguf(folder):  # the header holds what other models have in FILES
        add("numerics version of gguf", str(GGUF_VERSION).encode())
    wanted = FILES if "tokenizer.json" in there else FILES + SLOW_TOKENIZER_FILES
    for name in wanted:
        if name in there:
            add(f"file {name}", _whole(folder / name))
    for path in weight_files(folder) if has_weights else ():
        for start, data in _samples(path):
            add(f"weights {path.name} {start}", data)
    return digest.digest()


def _whole(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None


def _samples(path: Path) -> list[tuple[int, bytes]]:
    """The header of a weights file, and blocks at equal distances of the rest, each with its position."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            first = gguf_end(path) if start.startswith(MAGIC) else 8 + min(int.from_bytes(start, "little"), size)
            header = _read(file, 0, first)
            last = max(first, size - BLOCK_BYTES)
            starts = [first + (last - first) * number // (BLOCKS - 1) for number in range(BLOCKS)]
            blocks = [(start, _read(file, start, BLOCK_BYTES)) for start in starts]
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None
    return [(size, header), *blocks]


def _read(file: BinaryIO, start: int, count: int) -> bytes:
    file.seek(start)
    return file.read(count)
