"""The memory of a shard's device: how much of it keys and values may take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from text_generation_common.errors import MemoryLimitError
from text_generation_common.memory import cpu_bytes, free_bytes, is_out_of_memory

GPU_SHARE = 0.9


def available_bytes(device: torch.device, num_shard: int, gpu_fraction: float) -> int:
    """Bytes that one shard may use for keys and values. On a GPU, all memory of the shard together stays within
    `gpu_fraction`; CPUs' memory is shared by `num_shard` shards.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return gpu_bytes(free, total, torch.cuda.memory_reserved(device), gpu_fraction)
    return cpu_bytes(free_bytes(), num_shard)


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


@contextmanager
def memory_for(tokens: int) -> Iterator[None]:
    """A context for a prefill of `tokens` tokens. If memory runs out inside, a MemoryLimitError is raised."""
    with _out_of_memory(
        lambda: (
            f"Not enough memory to handle {tokens} prefill tokens. You need to decrease `--max-batch-prefill-tokens`"
        )
    ):
        yield


@contextmanager
def memory_of_cache(slots: int, per_slot: int, available: Callable[[], int]) -> Iterator[None]:
    """The same for keys and values of `slots` slots, of `per_slot` bytes each. `available` is asked after a failure."""

    def told() -> str:
        left = available()
        fits = max(1, min(left // per_slot, slots - 1))
        return (
            f"{slots} slots of keys and values need {slots * per_slot / 2**20:.0f} MiB, and the system gave less; the"
            f" limit is {left / 2**20:.0f} MiB: try --max-batch-total-tokens {fits}"
        )

    with _out_of_memory(told):
        yield


@contextmanager
def _out_of_memory(told: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch raises its own class on GPUs and a RuntimeError on CPUs
        if not is_out_of_memory(error):
            raise
        raise MemoryLimitError(told()) from None
