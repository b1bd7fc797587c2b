"""Keys and values of all tokens: a tensor per layer, a slot per token; and how many slots there is room for."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from text_generation_server.errors import MemoryLimitError
from text_generation_server.models.config import ModelConfig

# What a CPU shard leaves to everybody else on the host.
CPU_SHARE = 0.5
GPU_SHARE = 0.9


def bytes_per_slot(config: ModelConfig, kv_heads: int, dtype: torch.dtype) -> int:
    """`kv_heads`, here and below, are those of this rank."""
    return config.num_layers * 2 * kv_heads * config.head_size * dtype.itemsize


def make_kv_cache(
    config: ModelConfig,
    kv_heads: int,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    on_layer: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """[slots + 1, 2 * kv_heads, head_size] for each layer; the extra slot takes padding writes. Every page is touched,
    so that memory which is not there is missing now and not under load."""
    shape = (slots + 1, 2 * kv_heads, config.head_size)
    layers = []
    for _ in range(config.num_layers):
        # fill_, not zeros: the kernel gives zeros out of one shared page until somebody writes.
        layers.append(torch.empty(shape, dtype=dtype, device=device).fill_(0))
        on_layer()
    return layers


def available_bytes(device: torch.device, world_size: int) -> int:
    """Memory one shard may use for keys and values."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - GPU_SHARE) * total)
    return int(CPU_SHARE * _host_available_bytes() / world_size)


def _host_available_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *_cgroup_left()])


def _cgroup_left() -> list[int]:
    """What the control group still allows: version 2, then version 1; empty where there is no limit."""
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = Path(limit_file).read_text().strip(), int(Path(usage_file).read_text())
        except (OSError, ValueError):
            continue
        return [] if limit == "max" else [max(0, int(limit) - usage)]
    return []


def choose_slots(per_slot: int, available: int, useful: int, wanted: int | None, at_least: int) -> int:
    """The number of slots: what fits, but no more than can be used; or what the user wants, if it fits.

    `useful` is requests × tokens: more slots would never be filled. `at_least` is the longest request.
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
