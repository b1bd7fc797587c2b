"""Kills shards, or the engine, from a process of its own, at random times that do not depend on what they are doing.

    python killer.py LAUNCHER_PID URL --kills 20 --shards 2 --seed 1

Kills come in bursts of one, two or three, or of `--size`. If there are several shards, a kill takes one of them or all
at once. All gaps are drawn uniformly, by the wall clock, with one exception: the server's promises hold only for fewer
than MAX_IN_A_ROW kills without an answered step between them. One more kill therefore waits until a step has been
answered, and reports the length of this wait. Prints one line of JSON for each kill. A time at which no process of a
victim is alive passes without a kill."""

import argparse
import json
import math
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

import httpx
import processes
import psutil

from text_generation_benchmark.metrics import metric

MAX_IN_A_ROW = 5
SHARD, ENGINE = "shard", "engine"
BURSTS = (1, 2, 3)
# Seconds after a kill at which no answer is in flight any more, and the next epoch has not begun.
SETTLED_S = 0.3
# Longest gap in seconds from one kill to the next: about the time that shards take to start and to answer steps again.
LONGEST_WITHIN_BURST_S, LONGEST_BETWEEN_BURSTS_S = 5.0, 8.0
ALL_RANKS = 1 / 3  # share of kills, with several shards, that kill all shards at once
WAIT_LIMIT_S = 120.0
METHODS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Kill:
    at_s: float  # time of the kill by the wall clock
    burst: int
    size: int  # number of kills in the burst
    ranks: list[int]
    epoch: int  # 0: the engine was killed
    waited_s: float  # seconds of waiting for an answered step, required by MAX_IN_A_ROW
    in_a_row: int  # kills since the last answered step, the present kill included
    lost: dict[str, int]  # number of steps that the kill left unanswered, by method


@dataclass(frozen=True, slots=True)
class Steps:
    """The router's counts of steps, by method (prefill or decode)."""

    sent: dict[str, float]
    answered: dict[str, float]

    @property
    def num_answered(self) -> float:
        return sum(self.answered.values())

    @property
    def unanswered(self) -> dict[str, int]:
        return {method: int(self.sent[method] - self.answered[method]) for method in METHODS}


class Killer:
    """`asked`: the arguments of this program."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._metrics = httpx.Client(base_url=asked.url, timeout=30)
        self._rng = random.Random(asked.seed)
        # least and longest gap in seconds (before a burst, within a burst)
        self._gaps_s = ((asked.least, asked.longest), (SETTLED_S, min(asked.longest, asked.within)))
        # The killed processes, because a large process stays visible for a while after it was killed.
        self._killed: set[psutil.Process] = set()
        self._in_a_row = 0
        self._answered = 0.0  # number of steps answered when the last kill had taken effect
        self._lost = dict.fromkeys(METHODS, 0)  # number of steps left unanswered by all kills until now, by method

    def kills(self) -> Iterator[Kill]:
        """Ends with the burst in which the number of kills is reached, or before a kill that would come too late."""
        killed_s = time.time()
        end_s = killed_s + self._asked.seconds
        done = burst = 0
        while done < self._asked.kills:
            burst += 1
            size = self._asked.size or self._rng.choice(BURSTS)
            for place in range(size):
                gap_s = self._rng.uniform(*self._gaps_s[place > 0])
                ranks = self._draw_ranks()
                if killed_s + gap_s > end_s:
                    return
                time.sleep(max(0.0, killed_s + gap_s - time.time()))
                kill = self._kill(burst, size, ranks)
                killed_s = kill.at_s if kill else time.time()
                if kill is not None:
                    done += 1
                    yield kill

    def _draw_ranks(self) -> list[int]:
        all_ranks = list(range(self._asked.shards))
        return all_ranks if self._rng.random() < ALL_RANKS else [self._rng.choice(all_ranks)]

    def _kill(self, burst: int, size: int, ranks: list[int]) -> Kill | None:
        """Kills the shards of `ranks`, or the engine. Returns None if no victim's process was alive."""
        waited_s = self._wait_where_the_limit_says()
        victims = self._alive(ranks)
        if not victims:
            return None
        epoch = max(victims.values())
        at_s = time.time()
        for victim in victims:
            with suppress(ProcessLookupError):  # the shard has died of itself meanwhile
                os.kill(victim.pid, self._asked.signal)
        self._killed |= victims.keys()
        self._in_a_row += 1
        time.sleep(SETTLED_S)
        steps = self._steps()
        # Steps that earlier kills left unanswered are never answered: subtract them.
        lost = {method: steps.unanswered[method] - self._lost[method] for method in METHODS}
        self._answered, self._lost = steps.num_answered, steps.unanswered
        return Kill(at_s, burst, size, ranks, epoch, waited_s, self._in_a_row, lost)

    def _wait_where_the_limit_says(self) -> float:
        started_s, has_waited = time.monotonic(), False
        while True:
            if self._steps().num_answered > self._answered:
                self._in_a_row = 0
            if self._in_a_row < MAX_IN_A_ROW - 1:
                return time.monotonic() - started_s if has_waited else 0.0
            has_waited = True
            if time.monotonic() - started_s > WAIT_LIMIT_S:
                raise SystemExit(f"no step was answered within {WAIT_LIMIT_S} s")
            time.sleep(0.05)

    def _alive(self, ranks: list[int]) -> dict[psutil.Process, int]:
        """Living shards of `ranks`, or the engine, that this killer has not killed, with their epochs."""
        found, is_shard = {}, self._asked.victim == SHARD
        with suppress(psutil.Error):  # the launcher or a victim has ended meanwhile
            victims = (processes.shards if is_shard else processes.engines)(self._asked.launcher)
            for number, victim in victims.items():
                if (number in ranks or not is_shard) and victim not in self._killed and processes.living([victim]):
                    found[victim] = processes.epoch(victim) if is_shard else 0
        return found

    def _steps(self) -> Steps:
        """Reads the router's metrics; tries again while the router is too busy to answer."""
        while True:
            try:
                page = self._metrics.get("/metrics").text
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            counted = {
                what: {m: metric(page, f'tgi_batch_inference_{what}{{method="{m}"}}') for m in METHODS}
                for what in ("count", "success", "failure")
            }
            ended = {m: counted["success"][m] + counted["failure"][m] for m in METHODS}
            return Steps(counted["count"], ended)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("launcher", type=int, help="its process id")
    parser.add_argument("url")
    parser.add_argument("--victim", choices=(SHARD, ENGINE), default=SHARD)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no kill after them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", type=int, help="kills in a burst")
    parser.add_argument("--least", type=float, default=SETTLED_S, help="between bursts, seconds")
    parser.add_argument("--longest", type=float, default=LONGEST_BETWEEN_BURSTS_S, help="between bursts, seconds")
    parser.add_argument("--within", type=float, default=LONGEST_WITHIN_BURST_S, help="longest gap in a burst, seconds")
    parser.add_argument("--signal", type=int, default=signal.SIGKILL)
    for kill in Killer(parser.parse_args()).kills():
        print(json.dumps(asdict(kill)), flush=True)


if __name__ == "__main__":
    main()
