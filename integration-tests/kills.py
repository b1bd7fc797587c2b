"""Reads faults and starts of shards from a server's log, and computes for how long clients received no token."""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf
from statistics import median
from typing import Any

# Longest time in seconds after a kill at which clients receive answers that were in flight when the shard died.
IN_FLIGHT_S = 0.4


@dataclass(frozen=True, slots=True)
class Injected:
    """An injected fault, as logged by the server."""

    point: str
    action: str
    rank: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which no client received a token. `waits_s`: seconds from the first kill to the next token of each
    running stream.
    """

    num_kills: int
    waits_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.waits_s)

    @property
    def worst_s(self) -> float:
        return max(self.waits_s)


def log_entries(log: str) -> Iterator[dict[str, Any]]:
    """The log entries of a server that was started with --json-output."""
    for line in log.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def injected(log: str) -> list[Injected]:
    found = []
    for entry in log_entries(log):
        if match := re.match(r"fault injected: (\S+) (\w+)", entry["message"]):
            at_s = datetime.fromisoformat(entry["timestamp"]).timestamp()
            found.append(Injected(match[1], match[2], int(entry["rank"]), at_s))
    return found


def load_time_s(log: str) -> float:
    """Seconds of the first start of the shards, while the machine is idle: until the end of warm-up."""
    start_s, end_s = loads(log)[0]
    return end_s - start_s


def loads(log: str) -> list[tuple[float, float]]:
    """(Start, end) of each start of a group of shards: from its first process to the end of warm-up, or to the next
    start if the group died before."""
    found: list[tuple[float, float]] = []
    started_s: float | None = None
    for entry in log_entries(log):
        at_s = datetime.fromisoformat(entry["timestamp"]).timestamp()
        is_start = entry["message"] == "Starting shard"
        if started_s is not None and (is_start or entry["message"].startswith("Setting max batch total tokens to")):
            found.append((started_s, at_s))
            started_s = None
        if is_start:
            started_s = at_s
    return found if started_s is None else [*found, (started_s, inf)]


def outages(kill_times_s: Sequence[float], streams: Sequence[Sequence[float]]) -> list[Outage]:
    """Finds the outages. `streams`: the arrival times of each stream's events. If no client received a token between
    two kills, both belong to one outage, which begins with the first kill.
    """
    arrivals = sorted(arrival for stream in streams for arrival in stream)
    groups: list[list[float]] = []
    for at_s in sorted(kill_times_s):
        if groups and bisect_right(arrivals, groups[-1][-1] + IN_FLIGHT_S) >= bisect_left(arrivals, at_s):
            groups[-1].append(at_s)
        else:
            groups.append([at_s])
    found = [Outage(len(group), tuple(_waits(group, streams))) for group in groups]
    return [outage for outage in found if outage.waits_s]


def _waits(group: Sequence[float], streams: Sequence[Sequence[float]]) -> Iterator[float]:
    for stream in streams:
        after = bisect_right(stream, group[-1] + IN_FLIGHT_S)
        if bisect_right(stream, group[0]) and after < len(stream):
            yield stream[after] - group[0]
