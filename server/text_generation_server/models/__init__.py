"""The models: a shard's part of the weights, and what a forward pass computes of a step. `families` of the common
package lists the types that `decoder.py` computes; transformers computes all others, within `fallback/`.

Imports `layers/`, `step/` and what lies below them. Begin with `model.py`, what the runner needs of a model, then
`decoder.py`.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import config_fields, text_fields, unknown_type
from text_generation_common.models.families import FAMILIES
from text_generation_common.models.served import read_native
from text_generation_common.models.tensors import no_codes, with_checked_tensors
from text_generation_common.models.values import shown
from text_generation_common.quantized import served
from text_generation_common.quantized.tensors.codes import one_thread
from text_generation_server.device.arena import give_back
from text_generation_server.layers.weights import WeightFormat, dense
from text_generation_server.models.adapters import AdapterBank
from text_generation_server.models.decoder import Decoder
from text_generation_server.models.fallback.config import FallbackConfig, read_fallback_config
from text_generation_server.models.fallback.load import load_fallback
from text_generation_server.models.loading import Files, Loader, PackedLayers
from text_generation_server.models.model import Model
from text_generation_server.platforms import Platform

logger = logging.getLogger("text_generation_server")


def get_model(
    files: Files,
    config: ModelConfig | FallbackConfig,
    platform: Platform,
    dtype: torch.dtype,
    max_total_tokens: int,
    on_tensor: Callable[[], None],
    weight_format: WeightFormat = dense,
    packed: PackedLayers | None = None,
    head_format: WeightFormat | None = None,
    adapters: AdapterBank | None = None,
) -> Model:
    """Loads this rank's part of the weights. `on_tensor` is called for each tensor, as a sign of life. `weight_format`
    is the form in which linear layers keep weights that the files have as numbers, and `packed` reads all others.
    `head_format` is the form of a copy of the head. `adapters`: of a model of our own decoder.
    ModelError, before any weights are read, if the files lack tensors that `config` asks for or have others, and if the
    model cannot be split over the ranks."""
    if isinstance(config, FallbackConfig):
        return load_fallback(
            files,
            config,
            platform,
            dtype=dtype,
            max_total_tokens=max_total_tokens,
            on_tensor=on_tensor,
            weight_format=weight_format,
            packed=packed,
        )
    in_codes = no_codes if packed is None else packed.tensors
    config = with_checked_tensors(config, files.names, files.describe, in_codes)
    if config.names.within and platform.group.rank == 0:
        logger.info("the text model alone is loaded: of the files, only the tensors under %s", config.names.within)
    loader = Loader(
        files=files,
        platform=platform,
        dtype=dtype,
        on_tensor=on_tensor,
        weight_format=weight_format,
        transposed=config.names.transposed,
        packed=packed,
        head_format=head_format,
        adapters=adapters,
    )
    with nullcontext() if packed is None else one_thread():
        model = Decoder(config, platform, loader, max_total_tokens)
    loader.adapters.settle()
    give_back()
    logger.info("loaded %d tensors, %.1f MiB read", loader.num_tensors, files.bytes_read / 2**20)
    return model


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
    if reason := served.refusal(path, text_fields(fields).raw, is_ours=False):
        raise ModelError(reason)
    return replace(config, option=option)
