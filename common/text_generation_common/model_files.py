"""Finds where a model is, and reads its small files for launcher, router and server.

These files come from strangers. So a file that is not regular, or larger than any such file in use, is refused before
it is read.
"""

import errno
import json
import os
import stat
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from text_generation_common.errors import ArgumentValidation, ShardError
from text_generation_common.gguf.choice import model_in
from text_generation_common.gguf.container import is_gguf
from text_generation_common.gguf.hub_choice import HUB_FOLDER, hub_name
from text_generation_common.gguf.side_files import has_side_file, side_file

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


# How the small text begins that git leaves in the place of a large file when git-lfs is not installed.
LFS_START = b"version https://git-lfs.github.com/spec/"


class ModelFileError(Exception):
    """A file of a model cannot be used. The text is one line: the file, why it cannot be used, and what to do."""


class MissingFileError(ModelFileError):
    """The model has no such file."""


def limit_bytes(name: str) -> int:
    return LIMITS_MIB.get(name, LIMIT_MIB) * MIB


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file's content. Raises ModelFileError like `read_model_file`, and if the content is not an object."""
    return json_object(path, read_model_file(path))


def json_object(path: Path, text: bytes) -> dict[str, Any]:
    """The same for the file's content."""
    try:
        content = json.loads(text)
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
    read, is not regular, is too large, or was not fetched by git-lfs.
    """
    try:
        content = _made(path) if is_gguf(path.parent) else _read(path)
    except FileNotFoundError:
        raise MissingFileError(f"{path.parent} has no {path.name}: is it the directory of a model?") from None
    except OSError as error:
        reason = error.strerror or error
        raise ModelFileError(f"{path} cannot be read ({reason}): repair it, or download it again") from None
    if content.startswith(LFS_START):
        raise ModelFileError(not_fetched(path))
    return content


def has_model_file(path: Path) -> bool:
    """Whether the model has this file beside its weights, or a GGUF file in its place that tells what it would hold."""
    return path.exists() or (is_gguf(path.parent) and has_side_file(path))


def _made(path: Path) -> bytes:
    try:
        content = side_file(path)
    except ShardError as error:
        raise ModelFileError(str(error)) from None
    if content is None:
        raise FileNotFoundError
    return content


def not_fetched(path: Path) -> str:
    """An error's text about a file that begins with LFS_START."""
    return f"{path} is a pointer of git-lfs in the place of the file: run `git lfs pull` in its folder"


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


PATH_STARTS = ("/", "./", "../", "~")


def local_folder(model_id: str) -> Path | None:
    """The folder that `model_id` names, or the GGUF file that it names or that is in its folder, or None if there is
    none: the model may be on the hub. A file stands for a folder: `read_model_file` makes what it would hold."""
    try:
        folder = Path(model_id).expanduser()
    except RuntimeError:  # `~name`, and the machine has no such user
        return None
    if folder.is_dir():
        return model_in(folder)
    return folder if is_gguf(folder) else None


def is_meant_as_path(model_id: str) -> bool:
    """Whether `model_id` cannot be a hub id and looks like a path. An error then says that there is no such folder."""
    return not is_hub_id(model_id) and (model_id.startswith(PATH_STARTS) or model_id.count("/") > 1)


def is_hub_id(model_id: str) -> bool:
    """Whether `model_id` has the form of a hub id, such as `name`, `owner/name` or `owner/name:Q4_K_M`. Asks no hub."""
    return not model_id.startswith(PATH_STARTS) and hub_name(model_id) is not None


def served_name(given: str | None, model_id: str) -> str:
    """The model's name for clients: the flag's value, or without it the hub id or the name of the folder, which for a
    snapshot in the hub's cache is the hub id. A path would tell clients about this machine."""
    folder = None if given else local_folder(model_id)
    if folder is None:
        return given or model_id
    path = folder.absolute()
    if path.is_file():
        return path.name.removesuffix(".gguf")
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith(HUB_FOLDER):
        return repository.removeprefix(HUB_FOLDER).replace("--", "/")
    return path.resolve().name or model_id


def demo_directory() -> Path:
    """The demo model's folder, found without importing the package that contains it, which would load torch."""
    spec = find_spec("text_generation_server")
    if spec is None or not spec.submodule_search_locations:
        raise ArgumentValidation("the demo model is not installed: pass --model-id")
    return Path(spec.submodule_search_locations[0]) / "demo_model"
