"""What the router reads of a model's files besides its texts: where the files are, in a local directory or a snapshot
of the hub's repository, and the sampling parameters of generation_config.json.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text_generation_common.errors import ModelError
from text_generation_common.gguf.hub_choice import cached_file, hub_name
from text_generation_common.model_files import ModelFileError, find_json_object, local_folder
from text_generation_common.models.values import Fields
from text_generation_common.version import named
from text_generation_router.errors import StartError

PATTERNS = [
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    folder: Path
    sha: str | None  # commit of the snapshot; None for a local directory


def find_model_files(name: str, revision: str | None, override: str | None = None) -> ModelFiles:
    """Finds the files. `override`: a folder with the files, used instead of `name`. Raises StartError if the model is
    not found.
    """
    if override is not None:
        return ModelFiles(local_folder(override) or Path(override), None)
    if folder := local_folder(name):
        return ModelFiles(folder, None)
    # Imported here because this import is slow, and a local model does not need it.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    meant = hub_name(name)
    if meant is not None and (file := cached_file(Path(constants.HF_HUB_CACHE), meant, revision)):
        return ModelFiles(file, file.relative_to(constants.HF_HUB_CACHE).parts[2])
    if meant is not None and meant.tag is not None:
        raise StartError(
            f"the GGUF file {name} is not on this machine: run `text-generation-server download-weights {name}` first"
        )
    try:
        snapshot = Path(snapshot_download(name, revision=revision, allow_patterns=PATTERNS, **named()))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise StartError(
            f"the tokenizer of `{name}` is neither a local directory nor on the hub ({reason}); "
            "give --tokenizer-name a directory with a tokenizer.json, or a hub id that you may read"
        ) from error
    return ModelFiles(snapshot, snapshot.name)


# Sampling parameters that a model's generation_config.json recommends, for requests that leave them out
# (`--generation-config model`).

FILE = "generation_config.json"
MAX_TOP_K = 2**31 - 1


def read_defaults(folder: Path) -> dict[str, Any]:
    """The values of the folder's generation_config.json by the names of `Sampling`, none if it is missing. None of them
    is neutral. StartError for a wrong value."""
    try:
        fields = Fields(find_json_object(folder / FILE) or {}, str(folder / FILE))
        found: dict[str, Any] = {
            "do_sample": fields.flag("do_sample"),
            "temperature": fields.number("temperature", 0, 100, 1),
            "top_k": fields.whole("top_k", -1, MAX_TOP_K, 0),
            "top_p": fields.number("top_p", 0, 1, 1),
            "min_p": fields.number("min_p", 0, 1, 0),
            "typical_p": fields.number("typical_p", 1e-6, 1, 1),
            "repetition_penalty": fields.factor("repetition_penalty", 1),
        }
    except (ModelFileError, ModelError) as error:
        raise StartError(str(error)) from None
    if not found["temperature"]:  # the most likely tokens
        found |= {"do_sample": False, "temperature": 1}
    neutral = {"top_k": (-1, 0), "do_sample": (False,), "min_p": (0,)}
    return {name: value for name, value in found.items() if value not in neutral.get(name, (1,))}
