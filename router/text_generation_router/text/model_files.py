"""Where the router finds a model's text files: in a local directory, or in a snapshot of the hub's repository."""

from dataclasses import dataclass
from pathlib import Path

from text_generation_common.model_files import local_folder
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
        return ModelFiles(Path(override), None)
    if folder := local_folder(name):
        return ModelFiles(folder, None)
    # Imported here because this import is slow, and a local model does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(name, revision=revision, allow_patterns=PATTERNS, **named()))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise StartError(
            f"the tokenizer of `{name}` is neither a local directory nor on the hub ({reason}); "
            "give --tokenizer-name a directory with a tokenizer.json, or a hub id that you may read"
        ) from error
    return ModelFiles(snapshot, snapshot.name)
