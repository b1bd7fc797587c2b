"""Reads the config of a model of any type: our families without transformers, all others with it."""

from dataclasses import replace
from pathlib import Path

from text_generation_common import quantization
from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import config_fields, text_fields, unknown_type
from text_generation_common.models.families import FAMILIES
from text_generation_common.models.served import read_native
from text_generation_common.models.values import shown
from text_generation_server.models.fallback.config import FallbackConfig, read_fallback_config


def read_any_config(
    path: Path, rope_scaling: str | None = None, rope_factor: float | None = None, with_families: bool = True
) -> ModelConfig | FallbackConfig:
    """The same as `read_config` for a model of any type. transformers reads the config if the model is of none of our
    families, or has an option that our decoder lacks; without `with_families`, always."""
    fields, generation = config_fields(path)
    option = ""
    if with_families and text_fields(fields).word("model_type") in FAMILIES:
        native, option = read_native(path, rope_scaling, rope_factor)
        if native is not None:
            return native
    if rope_scaling or rope_factor is not None:
        raise ModelError(
            f"{fields.where}: --rope-scaling and --rope-factor are not supported for model type"
            f" {shown(fields.word('model_type'))}: remove them"
        )
    if (config := read_fallback_config(fields, generation)) is None:
        raise unknown_type(fields)
    if reason := quantization.refusal(path, text_fields(fields).raw, served={}):
        raise ModelError(reason)
    return replace(config, option=option)
