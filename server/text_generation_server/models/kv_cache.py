"""Holds keys and values of all tokens, in one tensor per layer with one slot per token, and finds how many fit."""

from collections.abc import Callable

import torch

from text_generation_server.device import host
from text_generation_server.device.arena import empty
from text_generation_server.errors import MemoryLimitError
from text_generation_server.kernels.interface import KvLayer
from text_generation_server.models.config import ModelConfig

# Share of the available memory that CPU shards use for keys and values; the rest is left to other processes.
CPU_SHARE = 0.5
GPU_SHARE = 0.9
# Types of the cache that need a scale for every slot and head.
SCALED = (torch.int8, torch.float8_e4m3fn)
SCALE = torch.float32


def bytes_per_slot(config: ModelConfig, kv_heads: int, dtype: torch.dtype) -> int:
    """Bytes of one slot in all layers. `kv_heads`, here and below, is this rank's number; `dtype` is the cache's."""
    per_head = config.head_size * dtype.itemsize + (SCALE.itemsize if dtype in SCALED else 0)
    return config.num_layers * 2 * kv_heads * per_head


def make_kv_cache(
    config: ModelConfig,
    kv_heads: int,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    on_layer: Callable[[], None] = lambda: None,
) -> list[KvLayer]:
    """A cache of `slots` slots in each layer, and one extra slot for the tokens of padding. Every page is written, so
    that a lack of memory shows now and not under load."""
    shape = (slots + 1, 2 * kv_heads, config.head_size)
    layers = []
    for _ in range(config.num_layers):
        # zero_ and not torch.zeros: the system maps pages of zeros to one shared page until they are written.
        heads = empty(shape, dtype, device).zero_()
        scales = empty(shape[:2], SCALE, device).zero_() if dtype in SCALED else None
        layers.append(KvLayer(heads, scales))
        on_layer()
    return layers


def give_back_memory(device: torch.device) -> None:
    """Gives the memory of freed tensors, which torch keeps, back to the device, where it would count as used."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def available_bytes(device: torch.device, world_size: int, gpu_fraction: float) -> int:
    """Bytes that one shard may use for keys and values. On a GPU its whole memory stays within `gpu_fraction`."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return gpu_bytes(free, total, torch.cuda.memory_reserved(device), gpu_fraction)
    return int(CPU_SHARE * host.available_bytes() / world_size)


def gpu_bytes(free: int, total: int, reserved: int, fraction: float) -> int:
    """Bytes that are left to this process, which has `reserved` of the device's `total`. Other processes may use the
    device as well: their memory is not part of `free`."""
    return max(0, int(min(free - (1 - GPU_SHARE) * total, fraction * GPU_SHARE * total - reserved)))


def choose_slots(per_slot: int, available: int, useful: int, wanted: int | None, at_least: int) -> int:
    """The number of slots: `wanted` if the user chose it and it fits, else as many as fit, but not more than `useful`.

    `useful` is requests × tokens: more slots would never be filled. `at_least` is the length of the longest request.
    """
    fits = available // per_slot
    if wanted is not None and wanted > fits:
        raise MemoryLimitError(
            f"--max-batch-total-tokens {wanted} needs {wanted * per_slot / 2**20:.0f} MiB of keys and values, but only"
            f" {available / 2**20:.0f} MiB are available: choose at most {fits}"
        )
    slots = min(fits, useful) if wanted is None else wanted
    if slots < at_least:
        raise MemoryLimitError(
            f"`max_total_tokens={at_least}` needs {at_least * per_slot / 2**20:.0f} MiB of keys and values, but there"
            f" is room for {slots} tokens: choose a smaller --max-total-tokens"
        )
    return slots
