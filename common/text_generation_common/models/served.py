"""Decides, before anything is loaded or downloaded, whether a model is one that can be served."""

import importlib.util
from pathlib import Path

from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import config_fields, read_config, unknown_type
from text_generation_common.models.families import FAMILIES
from text_generation_common.models.text_config import text_fields
from text_generation_common.models.values import Fields, shown

# The table of transformers that names the classes of causal language models, by the types of config.json.
_TABLE, _TABLE_END = "\nMODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "\n)"


def read_served(folder: Path, rope_scaling: str | None = None, rope_factor: float | None = None) -> ModelConfig | None:
    """The config of a model of one of our families, as `read_config` reads it. None if transformers may compute the
    model. ModelError if the model cannot be served."""
    return read_config(folder, rope_scaling, rope_factor) if check_type(folder) in FAMILIES else None


def check_type(folder: Path) -> str:
    """The model's type. ModelError if no model of this type can be served, or if the model is for another task."""
    fields = text_fields(config_fields(folder)[0])
    model_type = fields.word("model_type")
    if model_type in FAMILIES:
        return model_type
    known = known_to_transformers()
    if known is None:
        raise needs_transformers(fields)
    if known and f'"{model_type}"' not in known:
        raise code_of_repository(fields) if fields.has("auto_map") else unknown_type(fields)
    return model_type


def needs_transformers(fields: Fields) -> ModelError:
    return ModelError(
        f"{fields.where}: model type {shown(fields.word('model_type'))} needs transformers, which computes models of"
        " types that the server does not know itself: pip install 'tgi-py[transformers]'"
    )


def code_of_repository(fields: Fields) -> ModelError:
    return ModelError(
        f"{fields.where}: model type {shown(fields.word('model_type'))} is not supported: its code is in its repository"
        " (auto_map), and such code is never run"
    )


def known_to_transformers() -> str | None:
    """The part of transformers' source that lists the types of its causal language models, each in double quotes. None
    if transformers is not installed, "" if its source is not as expected. Importing it would take seconds."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        source = (Path(spec.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py").read_text()
    except (OSError, ValueError):
        return ""
    _, _, table = source.partition(_TABLE)
    return table.partition(_TABLE_END)[0]
