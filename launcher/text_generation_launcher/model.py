"""Finds the model's files and reads its config.json. Loads no weights and no tokenizer."""

from pathlib import Path
from typing import Any

from text_generation_common.errors import ArgumentValidation, WeightsError
from text_generation_common.file_names import only_gguf
from text_generation_common.flags.kinds import LoadFormat
from text_generation_common.flags.model import DEMO_MODEL
from text_generation_common.gguf.choice import SUFFIX as GGUF
from text_generation_common.gguf.choice import models_among
from text_generation_common.gguf.container import is_gguf
from text_generation_common.gguf.hub_choice import HubName, cached_file, hub_name
from text_generation_common.model_files import (
    ModelFileError,
    demo_directory,
    has_model_file,
    is_hub_id,
    local_folder,
    read_json_object,
)
from text_generation_common.quantized import served
from text_generation_common.weights.headers import file_names, weight_files
from text_generation_common.weights.tokenizer_files import FILE
from text_generation_launcher import mistakes
from text_generation_launcher.config import LaunchPlan

MAX_NAMED = 8  # maximum number of files that a message names


def locate(model_id: str, weights_cache_override: str | None) -> str:
    """The model id for the children: an absolute directory that holds a readable config.json, or a hub id.

    ArgumentValidation for a directory whose weights are quantized in a format that we do not serve. The config.json of
    a hub model is checked later, when it is downloaded and before the weights are.
    """
    directory = demo_directory() if model_id == DEMO_MODEL else local_folder(model_id)
    served = local_folder(weights_cache_override) if weights_cache_override else directory
    if served is not None:
        mistakes.refuse_folder(served)
        _refuse_gguf(served)
        _refuse_quantized(served)
    if directory is not None:
        read_json(directory / "config.json")
        return str(directory.absolute())
    _refuse_file(Path(model_id))
    if is_hub_id(model_id) and model_id.lower() != DEMO_MODEL:
        return str(hub_name(model_id))
    mistakes.refuse_form(model_id)
    if model_id.lower() == DEMO_MODEL:
        raise ArgumentValidation(
            f"--model-id {model_id} is neither a folder nor a hub id", f"did you mean {DEMO_MODEL}?"
        )
    raise ArgumentValidation(f"model directory {model_id} does not exist: check --model-id")


def _refuse_gguf(folder: Path) -> None:
    try:
        names = file_names(folder)
        found = models_among(names) if only_gguf(names) is not None and not is_gguf(folder) else []
    except WeightsError as error:
        raise ArgumentValidation(str(error)) from None
    if len(found) > 1:
        raise ArgumentValidation(
            f"{folder} has {len(found)} models in GGUF files, and no other weights: {', '.join(found[:MAX_NAMED])}",
            f"pass one of them as --model-id, such as {folder / found[0]}",
        )


def _refuse_file(path: Path) -> None:
    if not path.is_file():
        return
    if path.suffix == GGUF:
        raise ArgumentValidation(f"{path} does not begin as GGUF files do", "download it again")
    raise ArgumentValidation(f"{path} is a file: --model-id is a hub id or a directory", "pass the file's directory")


def _refuse_quantized(directory: Path) -> None:
    if reason := served.refusal(directory, read_json(directory / "config.json")):
        raise ArgumentValidation(reason)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ModelFileError as error:
        raise ArgumentValidation(str(error)) from None


def model_config(plan: LaunchPlan) -> dict[str, Any]:
    """The content of config.json, once the weights are downloaded. Empty when config.json cannot be read: the shard
    will then report why."""
    path = _config_path(plan)
    try:
        return read_json(path) if path else {}
    except ArgumentValidation:
        return {}


def folder_of(plan: LaunchPlan) -> Path | None:
    """The folder with the model's files. None for a model of the hub that is not on this machine yet."""
    path = _config_path(plan)
    return None if path is None else path.parent


def is_local(plan: LaunchPlan) -> bool:
    return _local(plan).is_dir() or is_gguf(_local(plan))


def is_ready(plan: LaunchPlan) -> bool:
    """Whether the model is a directory with all files in the form in which shards read them: there is nothing to
    download, to convert or to make."""
    folder = _local(plan)
    if not has_model_file(folder / FILE):
        return False
    try:
        return plan.load_format is LoadFormat.dummy or bool(weight_files(folder))
    except WeightsError:
        return False


def _local(plan: LaunchPlan) -> Path:
    name = plan.cache.weights_cache_override or plan.model_id
    return local_folder(name) or Path(name)


def _config_path(plan: LaunchPlan) -> Path | None:
    local = _local(plan)
    if local.is_dir() or is_gguf(local):
        return local / "config.json"
    return _cached_config(hub_name(plan.model_id), plan)


def _cached_config(name: HubName | None, plan: LaunchPlan) -> Path | None:
    """The config.json of a model in the hub's cache; of a GGUF file as if the file were a folder."""
    if name is None:
        return None
    # imported here because the import is slow, and needed for hub models only
    from huggingface_hub import constants, try_to_load_from_cache

    cache, revision = plan.cache.huggingface_hub_cache, plan.files.revision
    if file := cached_file(Path(cache or constants.HF_HUB_CACHE), name, revision):
        return file / "config.json"
    if name.tag is not None:
        return None
    cached = try_to_load_from_cache(name.repository, "config.json", cache_dir=cache, revision=revision)
    return Path(cached) if isinstance(cached, str) else None
