"""Which files of a model's folder hold its tokenizer, and whether they are there."""

import os
from pathlib import Path

from text_generation_common.errors import WeightsError, first_line
from text_generation_common.model_files import LFS_START, not_fetched
from text_generation_common.weights.names import SLOW_TOKENIZER_FILES

FILE = "tokenizer.json"


def has_tokenizer(path: Path) -> bool:
    """Whether the folder has a tokenizer.json, or files from which one can be made."""
    return any((path / name).exists() for name in (FILE, *SLOW_TOKENIZER_FILES))


def no_tokenizer(path: Path) -> str:
    return f"{path} has no {FILE} (a fast tokenizer)"


def unreadable(file: Path, error: BaseException) -> str:
    return f"{file} cannot be read as a tokenizer: {first_line(error)}; download it again"


def check_tokenizer(path: Path) -> None:
    """WeightsError if the folder has no tokenizer, and no files from which one can be made, or if tokenizer.json is
    empty or cut off. It is not parsed: large ones take a third of a second."""
    if not has_tokenizer(path):
        raise WeightsError(
            f"{no_tokenizer(path)}, and no files from which one can be made: use a model that has {FILE}"
        )
    if not (path / FILE).is_file():
        return
    with open(path / FILE, "rb") as file:
        first = file.read(64).lstrip()
        file.seek(max(0, os.fstat(file.fileno()).st_size - 64))
        last = file.read().rstrip()
    if first.startswith(LFS_START):
        raise WeightsError(not_fetched(path / FILE))
    if not (first.startswith(b"{") and last.endswith(b"}")):
        raise WeightsError(f"{path / FILE} is empty or cut off: repair it, or download it again")
