"""Says which quantized checkpoints are served, and refuses all others by the name of their format. Reads no tensors."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from text_generation_common.errors import WeightsError
from text_generation_common.quantized.announcement import FIELDS as FIELDS
from text_generation_common.quantized.announcement import Announcement, find_announcement
from text_generation_common.quantized.methods import READERS, UNQUANTIZED, description_of
from text_generation_common.quantized.settings import shown

# The methods of quantized checkpoints that are served. A version is to be raised with every change after which requests
# to models of this method may get other tokens.
VERSIONS: Mapping[str, int] = dict.fromkeys(READERS, 1) | {"bitsandbytes": 2}
EXPERTS_ALONE: Mapping[str, str] = {"mxfp4": "gpt_oss"}  # methods that one model type has, for its experts

# Names of tensors that hold quantized weights or belong to them, and the formats that have such tensors.
QUANTIZED_NAMES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\.(qweight|qzeros|scales)$", "gptq or awq"),
        (r"\.g_idx$", "gptq"),
        (r"\.weight_(packed|shape|zero_point|g_idx|global_scale)$", "compressed-tensors"),
        (r"\.(SCB|weight_format|absmax|quant_map|nested_absmax|nested_quant_map)$", "bitsandbytes"),
        (r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)$", "bitsandbytes"),
        (r"_(blocks|scales)$", "mxfp4"),
        (r"scale_inv$", "fp8"),
        (r"[._](k_scale|v_scale|q_scale|prob_scale)$", "a quantized KV cache"),
        (r"(^|[._])scale$", "fp8 or compressed-tensors"),
    )
)


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
    only = EXPERTS_ALONE.get(announcement.method)
    if only is not None and config.get("model_type") != only:
        return _refused(announcement, name, f"is supported for model type {only} only", UNQUANTIZED)
    if not is_ours and only is not None:
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
    """The method by which the weights are quantized, a key of VERSIONS; None if they are not, or are refused."""
    if refusal(folder, config) is not None:
        return None
    announcement = find_announcement(folder, config)
    return None if announcement is None else announcement.method
