"""Finds where a model is: in a folder of this machine, in the demo model's folder, or on the Hugging Face hub."""

import re
from importlib.util import find_spec
from pathlib import Path

from text_generation_common.errors import ArgumentValidation

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
HUB_FOLDER = "models--"  # how the names of folders of the hub's cache begin
PATH_STARTS = ("/", "./", "../", "~")


def local_folder(model_id: str) -> Path | None:
    """The folder that `model_id` names, or None if there is none: the model may be on the hub."""
    try:
        folder = Path(model_id).expanduser()
    except RuntimeError:  # `~name`, and the machine has no such user
        return None
    return folder if folder.is_dir() else None


def is_meant_as_path(model_id: str) -> bool:
    """Whether `model_id` cannot be a hub id and looks like a path. An error then says that there is no such folder."""
    return model_id.startswith(PATH_STARTS) or model_id.count("/") > 1


def is_hub_id(model_id: str) -> bool:
    """Whether `model_id` has the form of a hub id, `name` or `owner/name`. Asks no hub."""
    parts = model_id.split("/")
    return not is_meant_as_path(model_id) and bool(HUB_ID.fullmatch(model_id)) and not {".", ".."} & set(parts)


def served_name(given: str | None, model_id: str) -> str:
    """The model's name for clients: the flag's value, or without it the hub id or the name of the folder, which for a
    snapshot in the hub's cache is the hub id. A path would tell clients about this machine."""
    folder = None if given else local_folder(model_id)
    if folder is None:
        return given or model_id
    path = folder.absolute()
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
