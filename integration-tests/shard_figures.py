"""The MiB that each shard of a model reads from the checkpoint, and its peak memory."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import kills
import processes
from scale import Scale
from streams import run_streams

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ShardFigures:
    num_shard: int
    rank: int
    peak_memory: int  # peak resident bytes, including loading and 64 streams
    read_mib: float  # MiB read of the checkpoint's tensors


def shard_figures(scale: Scale, num_shard: int) -> list[ShardFigures]:
    """The figures of each shard of the demo model, after one run of streams."""
    with scale.server(num_shard) as server:
        run_streams(server.url, scale.asks()[: scale.num_streams], scale.num_streams)
        read = mib_read(server.log())
        shards = sorted(processes.shards(server.pid).items())
        return [ShardFigures(num_shard, rank, processes.peak_resident(shard), read[rank]) for rank, shard in shards]


def mib_read(log: str) -> dict[int, float]:
    """The MiB read by each rank, from the line that each shard logs after loading."""
    found = {}
    for entry in kills.log_entries(log):
        if match := re.search(r"([\d.]+) MiB read", entry["message"]):
            found[int(entry["rank"])] = float(match[1])
    return found


def total_mib(figures: Sequence[ShardFigures]) -> float:
    return sum(shard.read_mib for shard in figures)
