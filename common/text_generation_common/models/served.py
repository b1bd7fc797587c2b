"""Decides, before anything is loaded or downloaded, whether a model is one that can be served.

`refused_types.txt` holds the types of transformers that the shard refuses, with the reason.
"""

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from text_generation_common.errors import ModelError, UnsupportedOption
from text_generation_common.gguf.container import is_gguf
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import config_fields, read_config, text_fields, unknown_type
from text_generation_common.models.families import FAMILIES
from text_generation_common.models.fields import family_fields
from text_generation_common.models.values import Fields, shown

# The table of transformers that names the classes of causal language models, by the types of config.json.
_TABLE, _TABLE_END = "\nMODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "\n)"
# Kinds of layers that the server computes.
LAYER_KINDS = frozenset({"attention", "full_attention", "sliding_attention"})
# Types of hybrids that keep no state for a text if config.json says that all layers are attention.
STATELESS_IF_ATTENTION = frozenset({"granitemoehybrid"})


def read_served(folder: Path, rope_scaling: str | None = None, rope_factor: float | None = None) -> ModelConfig | None:
    """The config of a model of one of our families, as `read_config` reads it. None if transformers may compute the
    model. ModelError if the model cannot be served."""
    return read_native(folder, rope_scaling, rope_factor)[0]


def read_native(
    folder: Path, rope_scaling: str | None = None, rope_factor: float | None = None
) -> tuple[ModelConfig | None, str]:
    """The same, with the option of config.json because of which transformers computes a model of one of our families;
    "" if there is none."""
    if check_type(folder) not in FAMILIES:
        return None, ""
    try:
        return read_config(folder, rope_scaling, rope_factor), ""
    except UnsupportedOption as unsupported:
        is_stretched = rope_scaling is not None or rope_factor is not None
        is_ours = is_stretched or is_gguf(folder)
        if is_ours or not _has_option(text_fields(config_fields(folder)[0]), unsupported.option):
            raise
        return None, unsupported.option


def implementation_of(folder: Path) -> str | None:
    """What computes the model, `native` or `transformers`; None if the folder's files do not tell."""
    try:
        return "transformers" if read_served(folder) is None else "native"
    except ModelError:
        return None


def _has_option(fields: Fields, option: str) -> bool:
    """Whether transformers computes models of this type, and reads this field of their config.json."""
    model_type = fields.word("model_type")
    known = known_to_transformers()
    is_computed = known is not None and (not known or f'"{model_type}"' in known) and model_type not in refused_types()
    return is_computed and option in family_fields()[model_type]


@cache
def refused_types() -> Mapping[str, str]:
    """{model type: why no model of this type is served}, for types of transformers, ours among them."""
    lines = Path(__file__).with_name("refused_types.txt").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines)


def refused_kind(fields: Fields) -> str | None:
    """Why the shard would refuse a model of a type that transformers computes, as far as config.json and the table tell
    it; None if they do not."""
    model_type, kinds = fields.word("model_type"), fields.get("layer_types")
    if isinstance(kinds, list) and kinds:
        if others := sorted({str(kind) for kind in kinds} - LAYER_KINDS):
            return f"its layers are of the kind {', '.join(others)}"
        if model_type in STATELESS_IF_ATTENTION:
            return None
    return refused_types().get(model_type)


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
    if reason := refused_kind(fields):
        raise ModelError(f"{fields.where}: model type {shown(model_type)} is not supported: {reason}")
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
