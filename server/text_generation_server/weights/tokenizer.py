"""Makes a missing tokenizer.json from a model's slow tokenizer files, with transformers, in a process of its own:

python -m text_generation_server.weights.tokenizer DIRECTORY
"""

import importlib.util
import os
import sys
from pathlib import Path

from text_generation_common.model_files import MissingFileError, ModelFileError, read_model_file
from text_generation_server.errors import WeightsError
from text_generation_server.weights.child import run_child
from text_generation_server.weights.names import SIDE_FILES, SLOW_TOKENIZER_FILES

FILE = "tokenizer.json"


def has_tokenizer(path: Path) -> bool:
    """Whether the folder has a tokenizer.json, or files from which one can be made."""
    return any((path / name).exists() for name in (FILE, *SLOW_TOKENIZER_FILES))


def ensure_fast_tokenizer(path: Path) -> None:
    """Makes tokenizer.json if it is missing. WeightsError if it cannot be made."""
    if (path / FILE).exists():
        return
    missing = f"{path} has no {FILE} (a fast tokenizer)"
    if not has_tokenizer(path):
        raise WeightsError(f"{missing}, and no files from which one can be made: use a model that has {FILE}")
    if importlib.util.find_spec("transformers") is None:
        raise WeightsError(f"{missing}: install transformers, which can make one from the model's other files")
    _refuse_unreadable(path)
    try:
        run_child(__name__, str(path))
    except WeightsError as error:
        raise WeightsError(f"{missing}, and transformers could not make one: {error}") from None


def _refuse_unreadable(path: Path) -> None:
    """Raises WeightsError for named pipes and huge files. transformers would wait for a pipe for ever, and read a file
    of any size.
    """
    for name in (*SIDE_FILES, *SLOW_TOKENIZER_FILES):
        try:
            read_model_file(path / name)
        except MissingFileError:
            continue
        except ModelFileError as error:
            raise WeightsError(str(error)) from None


def write_fast_tokenizer(path: Path) -> None:
    # Imported in this process only, because the import takes seconds and loads torch.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, use_fast=True, trust_remote_code=False, local_files_only=True)
    if not tokenizer.is_fast:
        raise WeightsError(f"{type(tokenizer).__name__} has no fast version")
    temporary = path / f".{FILE}.tmp"
    tokenizer.backend_tokenizer.save(str(temporary))
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.replace(path / FILE)


def main() -> None:
    try:
        write_fast_tokenizer(Path(sys.argv[1]))
    except Exception as error:  # transformers raises errors of many classes; the caller prints this line
        lines = str(error).splitlines()
        sys.exit(f"Error: {lines[0] if lines else type(error).__name__}")


if __name__ == "__main__":
    main()
