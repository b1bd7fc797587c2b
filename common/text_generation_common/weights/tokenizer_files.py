"""Which files of a model's folder hold its tokenizer, whether they are there, and whether they can be read within
limits.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from text_generation_common.errors import WeightsError, first_line
from text_generation_common.file_names import SLOW_TOKENIZER_FILES
from text_generation_common.model_files import LFS_START, has_model_file, not_fetched, read_model_file
from text_generation_common.weights.child import limit_reader, main_of, run_child

FILE = "tokenizer.json"


def has_tokenizer(path: Path) -> bool:
    """Whether the folder has a tokenizer.json, or files from which one can be made."""
    return any(has_model_file(path / name) for name in (FILE, *SLOW_TOKENIZER_FILES))


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


# Reads a tokenizer.json and tokenizes a short text with it, in a process with limits, before a server's own process
# does:
#
#     python -m text_generation_common.weights.tokenizer_files FILE
#
# A few bytes of the file may ask for any length of text: a normalizer that replaces a letter by thousands, three times.

PROBE_CHARS = 1024
PRINTABLE = "".join(map(chr, range(0x20, 0x7F))) + "\n\t äß€ 語🦊"


def identity_of(file: Path) -> str:
    """Differs when the file is replaced or written: what was found in a probe may not hold any more."""
    status = (file if file.exists() else file.parent).stat()  # that of a GGUF file, of which the file is made
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def probe_tokenizer(file: Path) -> None:
    """WeightsError if the file cannot be read as a tokenizer, or takes more than the limits of a reader."""
    run_child(__name__, str(file))


def probe(file: Path) -> None:
    from tokenizers import Tokenizer  # here because the parent imports this module for the other function

    limit_reader([file])
    content = read_model_file(file)
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.decode(tokenizer.encode(_text(content)).ids)


def _text(content: bytes) -> str:
    """1,024 characters: what the file's own rules look for, then all printable ones of ASCII and a few others."""
    rules = json.loads(content)
    named = "".join(_patterns([rules.get("normalizer"), rules.get("pre_tokenizer")]))[: PROBE_CHARS // 2]
    return (named + PRINTABLE * (PROBE_CHARS // len(PRINTABLE) + 1))[:PROBE_CHARS]


def _patterns(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(value.get("String"), str):
        yield value["String"]
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _patterns(inner)


if __name__ == "__main__":
    main_of(probe)
