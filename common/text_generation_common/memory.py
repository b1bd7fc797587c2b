"""Finds out how much memory and how many cores this process may use, from the system and a container's limits, and how
many slots of keys and values the memory makes.
"""

import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from text_generation_common.errors import MemoryLimitError, first_line

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Number of cores that the process may use: the cores it may run on, limited by its quota of processor time. On
    systems that do not say, all cores of the machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *(max(1, math.ceil(quota)) for quota in _quotas(cgroup))])


def _quotas(cgroup: Path) -> Iterator[float]:
    """Quotas of processor time, in cores, from control groups version 2 and version 1. Yields nothing if there are no
    limits.
    """
    with suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        if quota != "max":
            yield int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            yield int(quota) / int(period)


# Parts of the errors of torch, C++, Rust, the loader of libraries and threads that are refused memory.
_REFUSED = (
    "allocate memory",
    "out of memory",
    "bad_alloc",
    "memory allocation of",
    "can't start new thread",
    "OutOfMemoryError",
)
# Share of the available memory that CPU shards use for keys and values. The rest is left to other processes.
CPU_SHARE = 0.5
# Lower bound of what loading takes besides the weights: small ones share mappings.
LOADING_BYTES = 64 * 2**20
# Share of what a shard may use below which keys and values surely find memory later, whatever other processes take: an
# eighth of what is free.
SURE_SHARE = 0.25


def free_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes of memory that are free, or that the system can free at once."""
    return min([_of_the_machine(), *_left(cgroup), *_address_space_left()])


def _of_the_machine() -> int:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(fields["MemAvailable"].split()[0]) * 1024


def is_out_of_memory(error: Exception) -> bool:
    """Whether the system, or a GPU, has refused memory."""
    return isinstance(error, MemoryError) or is_refused_memory(f"{type(error).__name__}: {error}")


def is_refused_memory(text: str) -> bool:
    """Whether the last words of a process say that it was refused memory."""
    return any(part in text for part in _REFUSED)


def refused_while_loading(error: Exception, weights: int) -> str:
    """What an operator is told when a shard whose weights have this number of bytes was refused memory."""
    cause = f"the system refused memory while {weights >> 20} MiB of weights were loaded ({first_line(error)})"
    if (limit := address_limit()) is None:
        return (
            f"{cause}, and {free_bytes() >> 20} MiB are free: choose a smaller model, or give it more memory or shards"
        )
    least = limit + weights + LOADING_BYTES
    return f"{cause}, and `ulimit -v` allows {limit >> 20} MiB: raise this limit to {least >> 20} MiB at least"


def address_limit() -> int | None:
    """Bytes of address space that a process may have, by `ulimit -v`; None: no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _address_space_left() -> Iterator[int]:
    """Bytes that `ulimit -v` still allows this process to map."""
    if (limit := address_limit()) is not None:
        with suppress(OSError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            yield max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))


def _left(cgroup: Path) -> Iterator[int]:
    """Bytes that the control group still allows. The group counts cached files as used, but they can be freed at
    once.
    """
    for limit, usage, statistics, files in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError, KeyError):
            fields = dict(line.split() for line in (cgroup / statistics).read_text().splitlines())
            used = int((cgroup / usage).read_text()) - int(fields[files])
            # ValueError if the limit is the word "max": there is no limit.
            yield max(0, int((cgroup / limit).read_text()) - used)


def cpu_bytes(free: int, num_shard: int) -> int:
    """Bytes that one of `num_shard` shards on CPUs may use for keys and values, if `free` bytes are free."""
    return int(CPU_SHARE * free / num_shard)


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
