"""Settings for access to the hub, and the directories that need none. Imports nothing of the hub's client, which takes
a quarter of a second: a shard of a local directory needs none of it.
"""

from dataclasses import dataclass, field
from pathlib import Path

from text_generation_common.errors import WeightsError
from text_generation_common.model_files import is_hub_id, is_meant_as_path, local_folder


@dataclass(frozen=True, slots=True)
class LineStyle:
    """How progress is logged where there is no terminal."""

    every_s: float = 5.0
    has_fields: bool = False  # whether lines have fields with numbers, from which a launcher draws a bar


@dataclass(frozen=True, slots=True)
class HubAccess:
    override: Path | None = None  # TGI's WEIGHTS_CACHE_OVERRIDE: use this directory for any model id
    cache_dir: Path | None = None  # None: huggingface_hub's cache, which depends on HF_HOME and HUGGINGFACE_HUB_CACHE
    token: str | None = field(default=None, repr=False)  # None: huggingface_hub's token, from HF_TOKEN
    progress: LineStyle = field(default_factory=LineStyle)

    @property
    def cache(self) -> Path:
        from huggingface_hub import constants

        return (self.cache_dir or Path(constants.HF_HUB_CACHE)).expanduser()


def described(model_id: str, revision: str | None) -> str:
    return f"{model_id} (revision {revision})" if revision else model_id


def local_directory(model_id: str, access: HubAccess) -> Path | None:
    """The directory that `model_id` or the override names, or None if `model_id` is an id of the hub. WeightsError for
    other ids.
    """
    if access.override is not None:
        if not access.override.is_dir():
            raise WeightsError(f"WEIGHTS_CACHE_OVERRIDE {access.override} is not a directory")
        return access.override
    if folder := local_folder(model_id):
        return folder
    if is_meant_as_path(model_id):
        raise WeightsError(f"{model_id} is not a directory")
    if not is_hub_id(model_id):
        raise WeightsError(f"{model_id!r} is neither a directory nor a model id like `name` or `owner/name`")
    return None
