"""Says which quantized checkpoints are served, and refuses all others by the name of their format. Reads no tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from text_generation_common.errors import WeightsError
from text_generation_common.quantized.announcement import FIELDS as FIELDS
from text_generation_common.quantized.announcement import Announcement, find_announcement
from text_generation_common.quantized.methods import READERS, UNQUANTIZED, description_of
from text_generation_common.quantized.settings import shown

# The methods of quantized checkpoints that are served, and the model types of config.json that may have them. None: all
# families of ours, whose layers are read by `models/quantized_layers.py`.
SERVED: Mapping[str, tuple[str, ...] | None] = {**dict.fromkeys(READERS), "mxfp4": ("gpt_oss",)}
NAMED = ("mxfp4",)  # methods whose tensors are known by their names


def refusal(folder: Path, config: Mapping[str, Any], *, is_ours: bool = True) -> str | None:
    """One line that names the format, or None when the weights are not quantized or their format is served. `config` is
    the content of the folder's config.json, as far as it is of the text model. `is_ours`: whether the server's own
    decoder computes the model."""
    try:
        announcement = find_announcement(folder, config)
        if announcement is None:
            return None
        name = description_of(announcement).method
    except WeightsError as error:
        return str(error)
    types = SERVED[announcement.method]
    if types is not None and config.get("model_type") not in types:
        return _refused(announcement, name, f"is supported for model type {' and '.join(types)} only", UNQUANTIZED)
    if not is_ours and announcement.method in NAMED:
        return _refused(announcement, name, "is not supported for a model that transformers computes", UNQUANTIZED)
    if not is_ours and _has_experts(config):
        why = "is not supported for the experts of a model that transformers computes"
        return _refused(announcement, name, why, UNQUANTIZED)
    return None


def _has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a config.json of any type counts experts, such as `num_local_experts`, at its top or one object below."""
    objects = (config, *(value for value in config.values() if isinstance(value, dict)))
    fields = (field for fields in objects for field in fields.items())
    return any(name.endswith("experts") and isinstance(value, int) and value > 1 for name, value in fields)


def _refused(announcement: Announcement, name: str, why: str, way_out: str) -> str:
    return f"{announcement.where}: the weights are quantized as {shown(name)}, which {why}: {way_out}"


def served_method(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The method by which the weights are quantized, a key of SERVED; None if they are not, or are refused."""
    if refusal(folder, config) is not None:
        return None
    announcement = find_announcement(folder, config)
    return None if announcement is None else announcement.method
