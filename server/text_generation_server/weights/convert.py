"""Converts PyTorch's pickled weights into safetensors, once, in a process of its own:

    python -m text_generation_server.weights.convert SOURCE TARGET

A pickle can run any code when it is loaded. Only tensors are accepted here, and the process does nothing else.
"""

import fcntl
import json
import os
import pickle
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from text_generation_common.errors import ShardError, WeightsError, first_line
from text_generation_common.file_names import INDEX, PICKLE_INDEX, missing_parts, pickle_names
from text_generation_common.weights.child import run_child
from text_generation_common.weights.headers import file_names, read_index, weight_files

if TYPE_CHECKING:
    from torch import Tensor

WORK_FOLDER = ".converting"


def pickle_files(path: Path) -> list[Path]:
    """PyTorch's weights files in a model directory; an empty list if there are none. WeightsError if a set is
    incomplete.
    """
    index = read_index(path / PICKLE_INDEX)
    names = pickle_names(file_names(path), None if index is None else set(index.values()))
    missing = [name for name in names if not (path / name).is_file()] or missing_parts(names)
    if missing:
        raise WeightsError(f"{path / missing[0]} is missing: download the model again")
    return [path / name for name in names]


def convert_apart(source: Path, target: Path) -> None:
    """Runs `convert` in another process. WeightsError with that process's error if it fails."""
    run_child(__name__, str(source), str(target))


def convert(source: Path, target: Path) -> None:
    """Writes model*.safetensors of `target` from the .bin or .pt files of `source`.

    All files are written to a temporary folder and moved at the end, the index first. A conversion that was killed
    leaves nothing, or an index without its files, and is repeated. Tied tensors are stored once; their other names are
    in the file's metadata (see SafetensorsFiles).
    """
    with _only_one(target):
        if _is_done(target):
            return
        work = target / WORK_FOLDER
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        weight_map: dict[str, str] = {}
        for file in pickle_files(source):
            name = safetensors_name(file.name)
            if name in weight_map.values():
                raise WeightsError(
                    f"{source} has two files that would become {name}: remove the one that is not needed"
                )
            weight_map |= dict.fromkeys(_convert_file(file, work / name), name)
        _move_all(work, target, weight_map)


def safetensors_name(name: str) -> str:
    return f"{Path(name).stem.removeprefix('pytorch_')}.safetensors"


def load_tensors(file: Path) -> "dict[str, Tensor]":
    """The tensors of a pickle file, read without running its code. WeightsError if it holds more than tensors, or is
    broken.
    """
    import torch

    try:
        # Files from before PyTorch 1.6 are not zip archives, and cannot be mapped into memory.
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"its pickle asks for {asked[1]}" if asked else "its pickle holds more than tensors"
        raise WeightsError(f"{file} was refused: {what}; use a model with safetensors weights") from None
    except Exception as error:  # torch raises errors of many classes for a broken file
        raise WeightsError(
            f"{file} cannot be read ({first_line(error)}): delete it and download the model again"
        ) from None
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise WeightsError(f"{file} does not hold a flat dictionary of tensors: use a model with safetensors weights")
    return {str(name): tensor.detach() for name, tensor in content.items()}


def split_tied(tensors: "dict[str, Tensor]") -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Finds tensors that have several names. Returns distinct contiguous tensors by name, and {other name: name}."""
    import torch

    distinct: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        is_alone = storage.nbytes() == tensor.nbytes and tensor.is_contiguous()
        distinct[name] = tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)
    return distinct, aliases


def _convert_file(file: Path, target: Path) -> list[str]:
    from safetensors.torch import save_file

    tensors, aliases = split_tied(load_tensors(file))
    save_file(tensors, target, metadata={"format": "pt"} | aliases)
    _sync(target)
    return list(tensors)


def _move_all(work: Path, target: Path, weight_map: dict[str, str]) -> None:
    files = sorted(set(weight_map.values()))
    if len(files) > 1:
        (work / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
        _sync(work / INDEX)
        files = [INDEX, *files]
    for name in files:
        (work / name).replace(target / name)
        _sync(target)
    work.rmdir()


def _is_done(target: Path) -> bool:
    try:
        return bool(weight_files(target))
    except WeightsError:
        return False


@contextmanager
def _only_one(target: Path) -> Iterator[None]:
    """Lets one conversion at a time write into `target`. A second conversion waits, and then finds the work done."""
    descriptor = os.open(target, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> None:
    source, target = (Path(argument) for argument in sys.argv[1:])
    try:
        convert(source, target)
    except ShardError as error:
        sys.exit(f"Error: {error}")
    except OSError as error:
        sys.exit(f"Error: weights cannot be converted in {target}: {error.strerror or error}")


if __name__ == "__main__":
    main()
