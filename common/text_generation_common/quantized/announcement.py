"""Finds where a checkpoint says how its weights are quantized: in config.json, or in a file beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text_generation_common.errors import WeightsError
from text_generation_common.model_files import ModelFileError, read_json_object

# Where a checkpoint names its format: fields of config.json, or a file that AutoGPTQ, AutoAWQ or ModelOpt has written.
FIELDS = ("quantization_config", "compression_config")
FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")

# Fields that show the method when there is no `quant_method`; the first field that is there counts.
MARKS: tuple[tuple[str, str], ...] = (
    ("quant_algo", "modelopt"),
    ("config_groups", "compressed-tensors"),
    ("w_bit", "awq"),
    ("zero_point", "awq"),
    ("version", "awq"),
    ("load_in_4bit", "bitsandbytes"),
    ("load_in_8bit", "bitsandbytes"),
    ("activation_scale_ub", "fbgemm_fp8"),
    ("bits", "gptq"),
)
# Other spellings of methods.
SPELLINGS: Mapping[str, str] = {
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "autoround": "auto-round",
    "compressed_tensors": "compressed-tensors",
    "fbgemm-fp8": "fbgemm_fp8",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "mxfp4_quark": "quark",
}


@dataclass(frozen=True, slots=True)
class Announcement:
    method: str  # quant_method, in the spelling of this package
    settings: Mapping[str, Any]
    where: str  # the file, for messages


def find_announcement(folder: Path, config: Mapping[str, Any]) -> Announcement | None:
    """The first announcement of a folder whose config.json is `config`, or None if its weights are not quantized.
    WeightsError if it cannot be read, or names no method."""
    where = str(folder / "config.json")
    text_config = config.get("text_config")
    inner = text_config if isinstance(text_config, dict) else {}
    settings = next((fields[name] for fields in (config, inner) for name in FIELDS if fields.get(name)), None)
    has_method = isinstance(settings, dict) and bool(settings.get("quant_method"))
    if isinstance(config.get("quantization"), dict) and not has_method:
        return Announcement("mlx", config["quantization"], where)
    if settings is not None:
        return announcement_of(settings, where)
    for name in FILES:
        if (folder / name).exists():
            return announcement_of(_content(folder / name), str(folder / name))
    return None


def announcement_of(settings: object, where: str) -> Announcement:
    if not isinstance(settings, dict):
        raise WeightsError(f"{where}: the settings of quantized weights are not an object: download the file again")
    if isinstance(inner := settings.get("quantization"), dict):  # hf_quant_config.json of ModelOpt
        settings = inner
    method = method_of(settings)
    if not isinstance(method, str):
        raise WeightsError(
            f"{where}: quant_method does not name how the weights are quantized: choose another checkpoint"
        )
    return Announcement(SPELLINGS.get(method.lower(), method.lower()), settings, where)


def method_of(settings: Mapping[str, Any]) -> object:
    """The value of quant_method, or without it the method that other fields show. None if none does."""
    return settings.get("quant_method") or next((name for field, name in MARKS if field in settings), None)


def _content(file: Path) -> object:
    try:
        return read_json_object(file)
    except ModelFileError as error:
        raise WeightsError(str(error)) from None
