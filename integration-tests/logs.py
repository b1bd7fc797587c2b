"""What the logs of servers tell, which were started with --json-output: faults, starts, and the loss of engines."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

READY = "Setting max batch total tokens to"


@dataclass(frozen=True, slots=True)
class Injected:
    """An injected fault, as logged by the server."""

    point: str
    action: str
    rank: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Notice:
    """A line of a front's log: an engine was connected or lost."""

    at_s: float
    target: str
    front: str
    is_lost: bool
    reason: str


def log_entries(log: str) -> Iterator[dict[str, Any]]:
    """The entries of a log, without lines that a kill has cut."""
    for line in log.splitlines():
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                yield json.loads(line)


def timed(log: str) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """Time, message and entry of each line."""
    for entry in log_entries(log):
        yield datetime.fromisoformat(entry["timestamp"]).timestamp(), str(entry.get("message", "")), entry


def injected(log: str) -> list[Injected]:
    found = []
    for at_s, message, entry in timed(log):
        if match := re.match(r"fault injected: (\S+) (\w+)", message):
            found.append(Injected(match[1], match[2], int(entry.get("rank", 0)), at_s))
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
    for at_s, message, _ in timed(log):
        is_start = message == "Starting shard"
        if started_s is not None and (is_start or message.startswith(READY)):
            found.append((started_s, at_s))
            started_s = None
        if is_start:
            started_s = at_s
    return found if started_s is None else [*found, (started_s, inf)]


def down(log: str) -> Iterator[tuple[float, float]]:
    """When a replica was down: from the injected death of its shard or engine to its being ready again."""
    since_s: float | None = None
    for at_s, message, _ in timed(log):
        if message.startswith("fault injected: "):
            since_s = at_s if since_s is None else since_s
        elif since_s is not None and message.startswith(READY):
            yield since_s, at_s
            since_s = None
    if since_s is not None:
        yield since_s, inf


def max_at_once(spans: Sequence[tuple[float, float]]) -> int:
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    count = most = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    return most


def mib_read(log: str) -> dict[int, float]:
    """The MiB of the checkpoint read by each rank, from the line that each shard logs after loading."""
    found = {}
    for entry in log_entries(log):
        if match := re.search(r"([\d.]+) MiB read", entry["message"]):
            found[int(entry["rank"])] = float(match[1])
    return found


class NoticeLog:
    """The notices in a growing log, of which only what is new is read."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._place = 0
        self._found: list[Notice] = []

    def read(self) -> list[Notice]:
        with self._log.open("rb") as file:
            file.seek(self._place)
            # A last line without its end is still being written.
            whole, newline, _ = file.read().rpartition(b"\n")
        self._place += len(whole) + len(newline)
        self._found += read_notices(whole.decode(errors="replace"))
        return self._found


def read_notices(log: str) -> Iterator[Notice]:
    for at_s, message, entry in timed(log):
        if found := re.match(r"engine (\S+) is (connected|lost)[:,] (.*)", message):
            yield Notice(at_s, found[1], str(entry.get("worker", "")), found[2] == "lost", found[3])
