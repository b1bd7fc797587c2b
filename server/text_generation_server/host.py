"""Finds out how many cores and how much memory this process may use, from the system and a container's limits."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Number of cores that the process may run on, limited by its quota of processor time. All cores of the machine on
    systems that do not tell."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *(max(1, math.ceil(quota)) for quota in _quotas(cgroup))])


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes of memory that are free, or that the system can free at once."""
    return min([_of_the_machine(), *_left(cgroup)])


def _quotas(cgroup: Path) -> Iterator[float]:
    """Quotas of processor time, in cores, of control groups version 2 and version 1. Yields nothing without limits."""
    with suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        if quota != "max":
            yield int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            yield int(quota) / int(period)


def _of_the_machine() -> int:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(fields["MemAvailable"].split()[0]) * 1024


def _left(cgroup: Path) -> Iterator[int]:
    """Bytes that the control group still allows. Cached files count as used there, but can be freed at once."""
    for limit, usage, statistics, files in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError, KeyError):
            fields = dict(line.split() for line in (cgroup / statistics).read_text().splitlines())
            used = int((cgroup / usage).read_text()) - int(fields[files])
            yield max(0, int((cgroup / limit).read_text()) - used)  # ValueError if the limit is "max"
