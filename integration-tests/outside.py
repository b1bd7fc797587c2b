"""Shards are killed by another process while mixed streams begin and end: measures what the clients notice."""

import asyncio
import json
import os
import random
import signal
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import kills
import mixed
from calls import metric
from killer import MOST_IN_A_ROW, Kill
from kills import Outage
from mixed import MixedAnswer, MixedAsk, MixedClients
from scale import Scale
from server_process import ServerProcess

KILLER = Path(__file__).parent / "killer.py"
# A small prefill budget, so that prompts take several chunks and warm-up is short.
ARGUMENTS = ("--max-total-tokens", "1536", "--max-batch-prefill-tokens", "256", "--enable-prefill-logprobs")
MOMENTS = ("prefill", "decode", "between steps", "replay", "load", "drain")
UNDER_WAY = 32
RECOVERY_LIMIT_S = 10.0
MARGIN_OVER_LOAD_S = 2.0
# Longest gap in seconds from one kill to the next while a server drains.
DRAIN_LONGEST_S = 2.0
# A drain begins a number of seconds after the first streams, drawn uniformly from this range. At most DRAIN_KILLS kills
# happen on a draining server.
DRAIN_AFTER_S = (2.0, 8.0)
DRAIN_KILLS = 3
DRAINED_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class KilledOutside:
    num_shard: int
    seed: int
    kills: Sequence[Kill]
    moments: Mapping[str, int]
    with_enough: int  # number of kills while at least UNDER_WAY streams ran
    streams: int
    longest_s: float  # longest duration of a stream
    kinds: Mapping[str, int]  # number of streams by kind of ask
    lost: Sequence[str]  # errors of streams that did not end normally
    different: Sequence[str]  # kinds of streams whose outcome differs from the run without faults
    drains: Sequence[int]  # exit statuses of the drained servers
    outages: Sequence[Outage]
    load_s: float

    def slow_outages(self) -> list[str]:
        """Outages after a single kill that lasted longer than the target. The target is not a requirement, because
        outages depend on the machine.
        """
        limit_s = min(self.load_s + MARGIN_OVER_LOAD_S, RECOVERY_LIMIT_S)
        waits = [outage.worst_s for outage in self.outages if outage.num_kills == 1]
        return [f"{wait:.1f} s from kill to next token, target {limit_s:.1f} s" for wait in waits if wait > limit_s]

    def failures(self) -> list[str]:
        found = [f"{len(self.lost)} of {self.streams} streams lost: {self.lost[0]}"] if self.lost else []
        found += [f"{len(self.different)} outcomes differ: {Counter(self.different)}"] if self.different else []
        found += [f"a drained server ended with {status}" for status in self.drains if status]
        too_many = [kill for kill in self.kills if kill.in_a_row >= MOST_IN_A_ROW]
        return found + ([f"more kills in a row than are promised to be harmless: {too_many}"] if too_many else [])


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """The answers to the asks without faults. They depend on the number of shards, as the rounding of sums does."""

    asked: Sequence[MixedAsk]
    answers: Sequence[MixedAnswer]

    @classmethod
    def of(cls, scale: Scale, num_shard: int) -> "Undisturbed":
        asked = mixed.mixed_asks(scale.num_streams, scale.mixed_tokens)
        with scale.server(num_shard, *ARGUMENTS) as server:
            answers = mixed.all_answers(server.url, asked)
        broken = [stream.error for stream in answers if stream.error]
        if broken:
            raise RuntimeError(f"{len(broken)} streams fail without any fault: {broken[0]}")
        return cls(asked, answers)


def kill_from_outside(scale: Scale, num_shard: int, num_kills: int, num_drains: int, seed: int) -> KilledOutside:
    """Kills shards of `num_drains` servers while they drain, then shards of one server at any time. Then requests each
    text of best_of again from this last server, without kills.
    """
    undisturbed = Undisturbed.of(scale, num_shard)
    record = Record(undisturbed)
    rng = random.Random(seed)
    for _ in range(num_drains):
        with scale.server(num_shard, *ARGUMENTS) as server:
            killer = KillerProcess(server, num_shard, DRAIN_KILLS, rng.randrange(2**31), DRAIN_LONGEST_S)
            clients = MixedClients(undisturbed.asked, scale.num_streams)
            asyncio.run(record.kill_while_draining(server, clients, killer, rng.uniform(*DRAIN_AFTER_S)))
    with scale.server(num_shard, *ARGUMENTS) as server:
        killer = KillerProcess(server, num_shard, num_kills, seed, scale.longest_gap_s)
        asyncio.run(record.kill_at_any_time(server, MixedClients(undisturbed.asked, scale.num_streams), killer))
        record.ask_again(server.url)
        record.take_log(server.log())
        return record.result(num_shard, seed, kills.load_time_s(server.log()))


class Record:
    """Collects kills, answers and logs while shards die, and computes the result from them."""

    def __init__(self, undisturbed: Undisturbed) -> None:
        self._undisturbed = undisturbed
        self._answers: list[MixedAnswer] = []
        self._kills: list[Kill] = []
        self._drained: list[Kill] = []
        self._statuses: list[int] = []
        self._loads: list[tuple[float, float]] = []  # (start of shards, end of warm-up)
        self._different: list[str] = []

    async def kill_at_any_time(self, server: ServerProcess, clients: MixedClients, killer: "KillerProcess") -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(clients.run(server.url))
            self._kills += await killer.kills()
            clients.finish()
        self._answers += clients.answers

    async def kill_while_draining(
        self, server: ServerProcess, clients: MixedClients, killer: "KillerProcess", after_s: float
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            streams = tasks.create_task(clients.run(server.url))
            await asyncio.sleep(after_s)
            clients.finish()
            # A request that arrives after SIGTERM is refused with 503, by design. So wait until all have arrived.
            while await asyncio.to_thread(metric, server.url, "tgi_request_count") < clients.num_counted:
                await asyncio.sleep(0.02)
            os.kill(server.pid, signal.SIGTERM)
            killing = tasks.create_task(killer.kills())
            await streams
            killer.stop()
        done = [kill for kill in killing.result() if kill.at_s < max(stream.ended_s for stream in clients.answers)]
        self._kills += done
        self._drained += done
        self._answers += clients.answers
        assert server.process is not None
        self._statuses.append(await asyncio.to_thread(server.process.wait, DRAINED_LIMIT_S))

    def take_log(self, log: str) -> None:
        self._loads += kills.loads(log)

    def ask_again(self, url: str) -> None:
        """Requests each text of best_of again, with the seed that the server drew, while no shard is killed."""
        asked = self._undisturbed.asked
        again = [
            pair
            for stream in self._answers
            if asked[stream.ask].kind == "best_of" and not stream.error
            for pair in mixed.asks_for_each_text(asked[stream.ask], stream)
        ]
        answers = mixed.all_answers(url, [ask for ask, _ in again])
        self._different += [
            "best_of" for (_, expected), stream in zip(again, answers, strict=True) if stream.outcome != (expected,)
        ]

    def result(self, num_shard: int, seed: int, load_s: float) -> KilledOutside:
        asked, expected = self._undisturbed.asked, self._undisturbed.answers
        whole = [stream for stream in self._answers if not stream.error]
        self._different += [
            asked[stream.ask].kind
            for stream in whole
            if not mixed.is_as_expected(asked[stream.ask], stream, expected[stream.ask])
        ]
        return KilledOutside(
            num_shard=num_shard,
            seed=seed,
            kills=self._kills,
            moments=Counter(self._moment(kill) for kill in self._kills),
            with_enough=sum(len(self._under_way(kill.at_s)) >= UNDER_WAY for kill in self._kills),
            streams=len(self._answers),
            longest_s=max(stream.ended_s - stream.started_s for stream in self._answers),
            kinds=Counter(asked[stream.ask].kind for stream in self._answers),
            lost=[f"{asked[stream.ask].kind}: {stream.error}" for stream in self._answers if stream.error],
            different=self._different,
            drains=self._statuses,
            outages=kills.outages(self._times(), [s.arrivals_s for s in self._answers if not asked[s.ask].is_slow]),
            load_s=load_s,
        )

    def _times(self) -> list[float]:
        """Times of the kills that did not happen on a draining server."""
        return [kill.at_s for kill in self._kills if kill not in self._drained]

    def _under_way(self, at_s: float) -> list[MixedAnswer]:
        return [stream for stream in self._answers if stream.started_s < at_s < stream.ended_s]

    def _moment(self, kill: Kill) -> str:
        """The moment of a kill (one of MOMENTS), found from the server's log, the server's metrics and the clients'
        times.
        """
        if kill in self._drained:
            return "drain"
        if any(start <= kill.at_s < end for start, end in self._loads):
            return "load"
        ready_s = max(end for _, end in self._loads if end <= kill.at_s)
        if self._is_replaying(kill.at_s, ready_s):
            return "replay"
        return next((method for method in ("prefill", "decode") if kill.lost[method]), "between steps")

    def _is_replaying(self, at_s: float, ready_s: float) -> bool:
        """Whether a stream whose client reads quickly ran when the shards were ready again, and has received no token
        since.
        """
        return any(
            stream.started_s < ready_s < at_s < stream.ended_s
            and stream.arrivals_s
            and not self._undisturbed.asked[stream.ask].is_slow
            and bisect_right(stream.arrivals_s, ready_s) == bisect_left(stream.arrivals_s, at_s)
            for stream in self._answers
        )


class KillerProcess:
    """Runs killer.py in another process. May be used once."""

    def __init__(self, server: ServerProcess, num_shard: int, num_kills: int, seed: int, longest_s: float) -> None:
        options = {"shards": num_shard, "kills": num_kills, "seed": seed, "longest": longest_s}
        flags = [f"--{name}={value}" for name, value in options.items()]
        self._command = [sys.executable, str(KILLER), str(server.pid), server.url, *flags]
        self._process: asyncio.subprocess.Process | None = None

    async def kills(self) -> list[Kill]:
        """Runs the killer. Returns its kills, when it has made all of them or after `stop` was called."""
        self._process = await asyncio.create_subprocess_exec(*self._command, stdout=asyncio.subprocess.PIPE)
        assert self._process.stdout is not None
        done = [Kill(**json.loads(line)) async for line in self._process.stdout]
        if (status := await self._process.wait()) and status != -signal.SIGTERM:
            raise RuntimeError(f"the killer ended with {status}")
        return done

    def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
