"""The models: a class each, and a row in the table below."""

import logging
from collections.abc import Callable

import torch

from text_generation_server.distributed import Group
from text_generation_server.errors import ModelError
from text_generation_server.kernels.interface import Kernels
from text_generation_server.models.config import ModelConfig
from text_generation_server.models.llama import Llama
from text_generation_server.models.loading import Files, Loader

log = logging.getLogger("text_generation_server")

MODELS = {"llama": Llama}


def get_model(
    files: Files,
    config: ModelConfig,
    kernels: Kernels,
    group: Group,
    device: torch.device,
    dtype: torch.dtype,
    max_total_tokens: int,
    on_tensor: Callable[[], None],
    int8: bool = False,
) -> Llama:
    """Loads this rank's part of the weights; `on_tensor` is called for each tensor, as a sign of life. `int8`: those of
    linear layers in 8 bits. ModelError for a kind of model we do not have, or one that cannot be split so."""
    if config.model_type not in MODELS:
        known = ", ".join(MODELS)
        raise ModelError(f"model type {config.model_type!r} is not supported yet, only: {known}")
    loader = Loader(files, group, device, dtype, on_tensor, int8)
    model = MODELS[config.model_type](config, kernels, loader, group, device, max_total_tokens)
    log.info("loaded %d tensors, %.1f MiB read", loader.num_tensors, files.bytes_read / 2**20)
    return model
