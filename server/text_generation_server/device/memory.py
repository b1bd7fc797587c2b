"""The memory of a shard's device: how much of it keys and values may take, and how many slots that makes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from text_generation_server.device import host
from text_generation_server.errors import MemoryLimitError

# Share of the available memory that CPU shards use for keys and values. The rest is left to other processes.
CPU_SHARE = 0.5
GPU_SHARE = 0.9


def available_bytes(device: torch.device, world_size: int, gpu_fraction: float) -> int:
    """Bytes that one shard may use for keys and values. On a GPU, all memory of the shard together stays within
    `gpu_fraction`.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return gpu_bytes(free, total, torch.cuda.memory_reserved(device), gpu_fraction)
    return int(CPU_SHARE * host.available_bytes() / world_size)


def gpu_bytes(free: int, total: int, reserved: int, fraction: float) -> int:
    """Bytes that this process may still take, if it has `reserved` bytes of the device's `total`. Other processes may
    use the device as well; their memory is not part of `free`.
    """
    return max(0, int(min(free - (1 - GPU_SHARE) * total, fraction * GPU_SHARE * total - reserved)))


def give_back_memory(device: torch.device) -> None:
    """Frees the memory of deleted tensors on the device. torch keeps this memory, and the device would count it as
    used.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def choose_slots(per_slot: int, available: int, useful: int, wanted: int | None, at_least: int) -> int:
    """The number of slots: `wanted` if the user chose it and it fits. Otherwise the largest number that fits, but not
    more than `useful`.

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


@contextmanager
def memory_for(tokens: int) -> Iterator[None]:
    """A context for a prefill of `tokens` tokens. If memory runs out inside, a MemoryLimitError is raised."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # If memory runs out, torch raises its own class on GPUs and a RuntimeError on CPUs.
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(error):
            raise
        raise MemoryLimitError(
            f"Not enough memory to handle {tokens} prefill tokens. You need to decrease `--max-batch-prefill-tokens`"
        ) from None
