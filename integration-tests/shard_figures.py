"""What one shard of a model reads and holds, by the number of shards."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import kills
import processes
from scale import Scale
from streams import listen

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ShardFigures:
    num_shard: int
    rank: int
    peak_memory: int  # bytes resident at most, loading and 64 streams included
    read_mib: float  # of the checkpoint's tensors


def shard_figures(scale: Scale, num_shard: int) -> list[ShardFigures]:
    """On the demo model, after a round of streams."""
    with scale.server(num_shard) as server:
        listen(server.url, scale.asks()[: scale.num_streams], scale.num_streams)
        read = mib_read(server.log())
        shards = sorted(processes.shards(server.pid).items())
        return [ShardFigures(num_shard, rank, processes.peak_resident(shard), read[rank]) for rank, shard in shards]


def mib_read(log: str) -> dict[int, float]:
    """By rank, from what each shard says when it has loaded its part."""
    found = {}
    for entry in kills.log_entries(log):
        if match := re.search(r"([\d.]+) MiB read", entry["message"]):
            found[int(entry["rank"])] = float(match[1])
    return found


def total_mib(figures: Sequence[ShardFigures]) -> float:
    return sum(shard.read_mib for shard in figures)
