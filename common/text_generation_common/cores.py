"""Counts the cores that this process may use, from the system and a container's limits."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
