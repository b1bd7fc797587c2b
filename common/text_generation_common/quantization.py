"""Finds the format in which the weights of a model are quantized, and refuses formats that are not served."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from text_generation_common.model_files import ModelFileError, read_json_object
from text_generation_common.quantized.announcement import FIELDS as FIELDS
from text_generation_common.quantized.announcement import FILES, method_of

# The formats of quantized checkpoints that are served, and the model types of config.json that may have them.
SERVED: Mapping[str, tuple[str, ...]] = {"mxfp4": ("gpt_oss",)}

# For each quantization format, the field of its settings that names the variant of the format.
KINDS: Mapping[str, str] = {
    "compressed-tensors": "format",
    "modelopt": "quant_algo",
    "bitsandbytes": "bnb_4bit_quant_type",
    "awq": "version",
    "gptq": "checkpoint_format",
}
LONGEST_NAME = 60


def refusal(folder: Path, config: Mapping[str, Any], served: Mapping[str, tuple[str, ...]] = SERVED) -> str | None:
    """One line that names the format, or None when the weights are not quantized or their format is served. `config` is
    the content of the folder's config.json."""
    for where, settings in _announcements(folder, config):
        name = format_name(settings)
        if config.get("model_type") not in served.get(name, ()):
            return (
                f"{folder / where}: the weights are quantized as {name}, which is not supported yet: choose the same "
                "model with unquantized weights (--quantize int8 makes them smaller on CPUs)"
            )
    return None


def served_format(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The format in which the weights are quantized, if it is served."""
    names = [format_name(settings) for _, settings in _announcements(folder, config)]
    return names[0] if names and refusal(folder, config) is None else None


def _announcements(folder: Path, config: Mapping[str, Any]) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = [("config.json", config[field]) for field in FIELDS if config.get(field)]
    return found + [(name, _content(folder / name)) for name in FILES if (folder / name).exists()]


def _content(file: Path) -> object:
    try:
        return read_json_object(file)
    except ModelFileError:
        # The file exists but cannot be read. The weights are quantized, because such files exist only then.
        return None


def format_name(settings: object) -> str:
    """The format's name, such as `gptq` or `compressed-tensors (pack-quantized)`."""
    if not isinstance(settings, dict):
        return "an unknown format"
    if isinstance(inner := settings.get("quantization"), dict):  # hf_quant_config.json of ModelOpt
        settings = inner
    method = method_of(settings) or "an unknown format"
    kind = settings.get(KINDS.get(method, "")) if isinstance(method, str) else None
    return _short(method) + (f" ({_short(kind)})" if kind else "")


def _short(value: object) -> str:
    """The value as one line of at most LONGEST_NAME characters, because the file may contain anything."""
    text = value if isinstance(value, str) and value.isascii() and value.isprintable() else json.dumps(value)
    return text[:LONGEST_NAME]
