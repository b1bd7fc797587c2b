"""The supported models: `families` lists them, `model` says what the runner needs of one."""

import logging
from collections.abc import Callable

import torch

from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.tensors import with_checked_tensors
from text_generation_server.layers.weights import WeightFormat, dense
from text_generation_server.models.decoder import Decoder
from text_generation_server.models.fallback.config import FallbackConfig
from text_generation_server.models.fallback.load import load_fallback
from text_generation_server.models.loading import Files, Loader
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
) -> Model:
    """Loads this rank's part of the weights. `on_tensor` is called for each tensor, as a sign of life. `weight_format`
    is the form in which linear layers keep their weights. ModelError, before any weights are read, if the files lack
    tensors that `config` asks for or have others, and if the model cannot be split over the ranks."""
    if isinstance(config, FallbackConfig):
        return load_fallback(files, config, platform, dtype, max_total_tokens, on_tensor, weight_format)
    config = with_checked_tensors(config, files.names, files.shape)
    if config.names.within and platform.group.rank == 0:
        logger.info("the text model alone is loaded: of the files, only the tensors under %s", config.names.within)
    loader = Loader(files, platform, dtype, on_tensor, weight_format, config.names.transposed)
    model = Decoder(config, platform, loader, max_total_tokens)
    logger.info("loaded %d tensors, %.1f MiB read", loader.num_tensors, files.bytes_read / 2**20)
    return model
