"""Finds out how much memory this process may use, from the system and a container's limits."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from text_generation_common.cores import CGROUP


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes of memory that are free, or that the system can free at once."""
    return min([_of_the_machine(), *_left(cgroup)])


def _of_the_machine() -> int:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(fields["MemAvailable"].split()[0]) * 1024


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
