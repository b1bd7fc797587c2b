"""Makes a missing tokenizer.json from a model's slow tokenizer files, in a process of its own:

    python -m text_generation_server.weights.tokenizer DIRECTORY

A sentencepiece model of Llama's or Gemma's kind is read here. transformers makes all others.
"""

import importlib.util
import os
from pathlib import Path

from tokenizers import Tokenizer

from text_generation_common.errors import WeightsError
from text_generation_common.file_names import SIDE_FILES, SLOW_TOKENIZER_FILES, TEMPLATES
from text_generation_common.model_files import (
    MissingFileError,
    ModelFileError,
    find_json_object,
    has_model_file,
    read_model_file,
)
from text_generation_common.weights.child import limit_reader, main_of, run_child
from text_generation_common.weights.tokenizer_files import FILE, check_tokenizer, no_tokenizer
from text_generation_server.weights.added_tokens import read_additions
from text_generation_server.weights.sentencepiece import read_sentencepieces
from text_generation_server.weights.sentencepiece_tokenizer import make_tokenizer

PIECES = "tokenizer.model"
# transformers' names of tokenizers that do with tokenizer.model what is done here. Files may name none.
KINDS = frozenset(
    {"CodeLlamaTokenizer", "CodeLlamaTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast", "LlamaTokenizer",
     "LlamaTokenizerFast"}
)  # fmt: skip


def ensure_fast_tokenizer(path: Path) -> None:
    """Makes tokenizer.json if it is missing. WeightsError if it cannot be made."""
    if has_model_file(path / FILE):
        return
    check_tokenizer(path)
    missing = no_tokenizer(path)
    _refuse_unreadable(path)
    is_ours = _is_ours(path)
    needed = ["transformers", *(["sentencepiece"] if _has_pieces(path) else [])]
    if not is_ours and (absent := [name for name in needed if importlib.util.find_spec(name) is None]):
        raise WeightsError(
            f"{missing}: install {' and '.join(absent)}, with which one can be made from the model's other files"
        )
    try:
        run_child(__name__, str(path))
    except WeightsError as error:
        maker = "" if is_ours else " by transformers"
        raise WeightsError(f"{missing}, and none could be made{maker}: {error}") from None


def _has_pieces(path: Path) -> bool:
    return any((path / name).exists() for name in (PIECES, "spiece.model", "sentencepiece.bpe.model"))


def _is_ours(path: Path) -> bool:
    """Whether tokenizer.model is of a kind that is read here."""
    if not (path / PIECES).exists():
        return False
    try:
        kind = (find_json_object(path / "tokenizer_config.json") or {}).get("tokenizer_class")
    except ModelFileError as error:
        raise WeightsError(str(error)) from None
    return kind is None or (isinstance(kind, str) and kind in KINDS)


def _named(path: Path) -> list[Path]:
    return [path / name for name in (*SIDE_FILES, *SLOW_TOKENIZER_FILES)]


def _refuse_unreadable(path: Path) -> None:
    """Raises WeightsError for named pipes and huge files. transformers would wait for a pipe for ever, and read a file
    of any size.
    """
    for file in (*_named(path), *path.glob(TEMPLATES + "*.jinja")):
        try:
            read_model_file(file)
        except MissingFileError:
            continue
        except ModelFileError as error:
            raise WeightsError(str(error)) from None


def write_fast_tokenizer(path: Path) -> None:
    tokenizer = _of_pieces(path) if _is_ours(path) else _of_transformers(path)
    temporary = path / f".{FILE}.tmp"
    tokenizer.save(str(temporary))
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.replace(path / FILE)


def _of_pieces(path: Path) -> Tokenizer:
    file = path / PIECES
    limit_reader(_named(path))
    model = read_sentencepieces(read_model_file(file), str(file))
    return make_tokenizer(model, read_additions(path, model), str(file))


def _of_transformers(path: Path) -> Tokenizer:
    # Imported in this process only, because the import takes seconds and loads torch.
    from transformers import AutoTokenizer

    limit_reader(_named(path))
    tokenizer = AutoTokenizer.from_pretrained(path, use_fast=True, trust_remote_code=False, local_files_only=True)
    if not tokenizer.is_fast:
        raise WeightsError(f"{type(tokenizer).__name__} has no fast version")
    return tokenizer.backend_tokenizer  # type: ignore[no-any-return]


if __name__ == "__main__":
    main_of(write_fast_tokenizer)
