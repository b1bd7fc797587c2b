"""Which shard is killed when: the plan of a chaos run as FAILPOINTS, and what the server's log says came of it."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

from streams import Heard

# The fault injection point of each kind of moment. Recovery is the warm-up of a generation that follows a lost one.
POINTS = {
    "prefill": "shard.prefill",
    "decode": "shard.decode",
    "between steps": "shard.between",
    "load": "shard.load",
    "recovery": "shard.warmup",
}
# After which none of the generation's streams has got a token: several in a row are one outage.
BEFORE_ANY_TOKEN = ("load", "recovery")
EACH_ONCE = ["prefill", "load", "decode", "recovery", "between steps"]
# At which pass through its point a kill comes. A generation begins by putting back the streams that were aboard the
# failed step, alone and one after another, and one that dies then a second time in a row is failed, by design: so a
# kill in prefill is the first of all, one in decode comes when decoding has begun again, and one between steps so many
# steps after the last stream is back.
FIRST_PREFILL_PASSES = (2, 3)
DECODE_PASSES = (6, 14)
STEPS_AFTER_RESUME = (6, 16)
# Answers that were on their way when the shard died are heard this much later at most.
IN_FLIGHT_S = 0.4


@dataclass(frozen=True, slots=True)
class Kill:
    generation: int
    rank: int
    kind: str
    at: int

    def rule(self) -> str:
        return f"{POINTS[self.kind]}[generation={self.generation},rank={self.rank}]:kill@{self.at}"


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault as the log has it."""

    point: str
    action: str
    rank: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Outage:
    """From a kill to the next token of each stream that was under way."""

    num_kills: int
    waits_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.waits_s)

    @property
    def worst_s(self) -> float:
        return max(self.waits_s)


def plan(kinds: Sequence[str], num_shard: int, num_streams: int, seed: int) -> list[Kill]:
    """One kill for each generation from the first on, of a random rank, in the order of `kinds`."""
    if "prefill" in kinds[1:]:
        raise ValueError("a kill in prefill must be the first: later it would hit streams that have just been hit")
    rng = random.Random(seed)
    return [
        Kill(generation, rng.randrange(num_shard), kind, rng.randint(*_passes(kind, num_streams)))
        for generation, kind in enumerate(kinds, start=1)
    ]


def _passes(kind: str, num_streams: int) -> tuple[int, int]:
    """The first and the last pass at which such a kill may come. Load and warm-up have only one."""
    first, last = STEPS_AFTER_RESUME
    passes = {
        "prefill": FIRST_PREFILL_PASSES,
        "decode": DECODE_PASSES,
        "between steps": (num_streams + first, num_streams + last),
    }
    return passes.get(kind, (1, 1))


def kinds_of(num_kills: int, seed: int) -> list[str]:
    """Of five kills each kind once; of ten the order is a matter of the seed."""
    if num_kills == len(EACH_ONCE):
        return EACH_ONCE
    if num_kills == 10:
        return shuffled_kinds(seed)
    raise ValueError(f"there is no plan for {num_kills} kills: 5 or 10")


def shuffled_kinds(seed: int) -> list[str]:
    """Ten, never two in a row before any token, so that the launcher, which gives up after five failures without one,
    goes on."""
    rng = random.Random(seed)
    running = [*["decode"] * 3, *["between steps"] * 3]
    rng.shuffle(running)
    kinds = ["prefill", *running]
    # Each after another running one: the places are taken from the back, so that they stay apart.
    places = sorted(rng.sample(range(1, len(kinds)), 3), reverse=True)
    for place, kind in zip(places, rng.sample(["load", "recovery", "load"], 3), strict=True):
        kinds.insert(place, kind)
    return kinds


def failpoints(kills: Sequence[Kill]) -> dict[str, str]:
    return {"FAILPOINTS": ";".join(kill.rule() for kill in kills)}


def log_entries(log: str) -> Iterator[dict[str, Any]]:
    """The lines of a server that was started with --json-output."""
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


def missed(kills: Sequence[Kill], faults: Sequence[Injected]) -> list[Kill]:
    """The kills of the plan that never happened."""
    happened = [(fault.point, fault.rank) for fault in faults if fault.action == "kill"]
    left = []
    for kill in kills:
        if (POINTS[kill.kind], kill.rank) in happened:
            happened.remove((POINTS[kill.kind], kill.rank))
        else:
            left.append(kill)
    return left


def load_time_s(log: str) -> float:
    """Of the first start, with nothing else to do: from the start of the shards until the router has warmed them up."""
    times: dict[str, datetime] = {}
    for entry in log_entries(log):
        times.setdefault(entry["message"], datetime.fromisoformat(entry["timestamp"]))
    return (times["Connected"] - times["Starting shard"]).total_seconds()


def outages(kill_times_s: Sequence[float], heard: Sequence[Heard]) -> list[Outage]:
    """Kills between which nobody heard a token are one outage, counted from the first of them."""
    times = sorted(kill_times_s)
    tokens = sorted(arrival for stream in heard for arrival in stream.arrivals_s)
    groups: list[list[float]] = []
    for at_s in times:
        if groups and not any(groups[-1][-1] + IN_FLIGHT_S < token < at_s for token in tokens):
            groups[-1].append(at_s)
        else:
            groups.append([at_s])
    found = [Outage(len(group), tuple(_waits(group, heard))) for group in groups]
    return [outage for outage in found if outage.waits_s]


def _waits(group: Sequence[float], heard: Sequence[Heard]) -> Iterator[float]:
    for stream in heard:
        before = [arrival for arrival in stream.arrivals_s if arrival <= group[0]]
        after = [arrival for arrival in stream.arrivals_s if arrival > group[-1] + IN_FLIGHT_S]
        if before and after:
            yield after[0] - group[0]
