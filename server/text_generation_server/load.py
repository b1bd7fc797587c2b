"""From a shard's settings to a model that can run steps."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from text_generation_server.config import ShardConfig
from text_generation_server.distributed import Group, join_group
from text_generation_server.errors import ModelError
from text_generation_server.kernels import select_backend
from text_generation_server.models import get_model
from text_generation_server.models.config import DTYPES, ModelConfig, read_config
from text_generation_server.runner import ModelRunner
from text_generation_server.sampling.sampler import Sampler
from text_generation_server.worker import Worker

log = logging.getLogger("text_generation_server")


@dataclass(frozen=True, slots=True)
class Shard:
    """What loading makes."""

    runner: ModelRunner
    group: Group
    tokenizer: Tokenizer
    model_config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    kernels: str  # the backend's name


def load_shard(config: ShardConfig, worker: Worker) -> Shard:
    """Reads the weights. ShardError where the model cannot be served.

    Belongs into the worker's thread: torch keeps a pool of threads for each thread that computes, and the OpenMP
    run-time stops spinning at barriers as soon as pools hold more threads than there are cores: steps took 2.5 times
    as long after loading in the main thread.
    """
    torch.set_num_threads(max(1, usable_cores() // config.world_size))
    device = _choose_device(config)
    model_config = read_config(config.model_path, config.rope_scaling, config.rope_factor)
    dtype = _choose_dtype(config.dtype, model_config, device)
    longest = config.max_total_tokens or model_config.max_positions
    if longest > model_config.max_positions:
        raise ModelError(
            f"`max_total_tokens` must be <= {model_config.max_positions}, the longest sequence this model was made for."
            f" Given: {longest}. --rope-scaling and --rope-factor stretch it"
        )
    backend = select_backend(device)
    rendezvous = Path(f"{config.uds_path}-{config.generation}.rendezvous")
    group = join_group(config.rank, config.world_size, device, rendezvous)
    model = get_model(
        config.model_path, model_config, backend.kernels, group, device, dtype, longest, worker.advance_progress
    )
    sampler = Sampler(backend.kernels, config.watermark_gamma, config.watermark_delta, worker.advance_progress)
    runner = ModelRunner(model, model_config, backend, sampler, group, device, dtype, longest, worker.advance_progress)
    tokenizer = Tokenizer.from_file(str(config.model_path / "tokenizer.json"))
    return Shard(runner, group, tokenizer, model_config, dtype, device, backend.name)


def usable_cores() -> int:
    """Those this process may run on; all of the machine's where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _choose_device(config: ShardConfig) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() < config.world_size:
        raise ModelError(
            f"--num-shard {config.world_size} needs as many GPUs, and {torch.cuda.device_count()} are in sight: check"
            " CUDA_VISIBLE_DEVICES, or choose fewer shards"
        )
    return torch.device("cuda", config.rank)


def _choose_dtype(wanted: str | None, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    dtype = DTYPES[wanted] if wanted else model_config.dtype
    if device.type != "cpu" or dtype != torch.float16:
        return dtype
    if wanted:
        raise ModelError("--dtype float16 is not supported on CPUs: choose bfloat16 or float32")
    log.info("the checkpoint is float16, which CPUs do not compute: serving it in bfloat16")
    return torch.bfloat16
