"""Makes a model ready to be served: all files on this machine, weights in safetensors, with a fast tokenizer."""

import logging
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import constants

from text_generation_common.errors import WeightsError
from text_generation_common.weights.headers import read_json, verify, weight_files
from text_generation_common.weights.tokenizer_files import has_tokenizer
from text_generation_server.weights.convert import convert_apart, pickle_files
from text_generation_server.weights.files import HubAccess, described, local_directory
from text_generation_server.weights.hub import cached_snapshot, download
from text_generation_server.weights.tokenizer import ensure_fast_tokenizer
from text_generation_server.weights.transfer import Retries

logger = logging.getLogger(__name__)


def prepare(
    model_id: str,
    revision: str | None,
    access: HubAccess | None = None,
    auto_convert: bool = True,
    retries: Retries | None = None,
) -> Path:
    """Downloads, converts or makes the files that are missing, checks the files, and returns their directory.
    WeightsError if this fails."""
    access = access or HubAccess()
    path = _present(model_id, revision, access)
    if path is None:
        path = download(model_id, revision, access, auto_convert, retries)
    else:
        logger.info("Files are already present on the host. Skipping download.")
    if not _has(weight_files, path) and pickle_files(path):
        _convert(path, described(model_id, revision), auto_convert)
    verify(path)
    ensure_fast_tokenizer(path)
    return path


def prepare_without_weights(model_id: str, access: HubAccess) -> Path:
    """The directory of a model for random weights. WeightsError if it lacks config.json or a tokenizer."""
    path = local_directory(model_id, access)
    if path is None:
        raise WeightsError(
            f"--load-format dummy downloads nothing, and {model_id} is not a directory: make one with config.json and"
            " tokenizer.json"
        )
    read_json(path / "config.json")
    ensure_fast_tokenizer(path)
    return path


def _present(model_id: str, revision: str | None, access: HubAccess) -> Path | None:
    """The model's directory if it needs no download, or None: a local directory, whatever it holds, or a complete
    snapshot in the cache. A GGUF file without a tag in the model id is none: its repository may have safetensors.
    """
    if path := local_directory(model_id, access):
        read_json(path / "config.json")
        return path
    path = cached_snapshot(model_id, revision, access)
    if path is not None and path.is_file() and ":" not in model_id and not constants.HF_HUB_OFFLINE:
        return None
    return path if path and has_tokenizer(path) and (_has(weight_files, path) or _has(pickle_files, path)) else None


def _has(find: Callable[[Path], list[Path]], path: Path) -> bool:
    try:
        return bool(find(path))
    except WeightsError:
        return False


def _convert(path: Path, model: str, auto_convert: bool) -> None:
    if not auto_convert:
        raise WeightsError(f"{model} has no .safetensors weights, and --no-auto-convert is set")
    logger.warning("No safetensors weights found for %s. Converting PyTorch weights to safetensors.", model)
    convert_apart(path, path)
