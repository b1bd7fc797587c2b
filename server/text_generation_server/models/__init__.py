"""The supported models: each is a class, and a row in the table below."""

import logging
from collections.abc import Callable

import torch

from text_generation_server.distributed import Group
from text_generation_server.kernels.interface import Kernels
from text_generation_server.models.config import ModelConfig
from text_generation_server.models.llama import Llama
from text_generation_server.models.loading import Files, Loader
from text_generation_server.models.tensors import check_tensors

log = logging.getLogger("text_generation_server")

MODELS = {"llama": Llama}  # one row for each model type of fields.READ


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
    """Loads this rank's part of the weights. `on_tensor` is called for each tensor, as a sign of life. `int8` keeps the
    weights of linear layers in 8 bits. ModelError, before any weights are read, if the files lack tensors that `config`
    asks for or have others, and if the model cannot be split over the ranks."""
    check_tensors(config, files.names, files.shape)
    loader = Loader(files, group, device, dtype, on_tensor, int8)
    model = MODELS[config.model_type](config, kernels, loader, group, device, max_total_tokens)
    log.info("loaded %d tensors, %.1f MiB read", loader.num_tensors, files.bytes_read / 2**20)
    return model
