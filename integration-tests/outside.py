"""Shards are killed by another process while mixed streams begin and end: measures what the clients notice."""

import asyncio
import json
import os
import random
import signal
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import logs
from asks import Ask, mixed_asks
from calls import metric
from killer import MAX_IN_A_ROW, Kill
from outcome import on_this_machine, table
from scale import Scale
from server_process import ServerProcess
from streams import StreamAnswer, StreamClients, ask_again, differences, undisturbed_answers

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
# Longest time in seconds after a kill at which clients receive answers that were in flight when the shard died.
IN_FLIGHT_S = 0.4


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which no client received a token. `waits_s`: seconds from the first kill to the next token of each
    running stream."""

    num_kills: int
    waits_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.waits_s)

    @property
    def worst_s(self) -> float:
        return max(self.waits_s)


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
    different: Sequence[str]  # how outcomes of others differ from the run without faults
    drains: Sequence[int]  # exit statuses of the drained servers
    outages: Sequence[Outage]
    load_s: float

    def slow_outages(self) -> list[str]:
        """Outages after a single kill that lasted longer than the target. The target is not a requirement, because
        outages depend on the machine."""
        limit_s = min(self.load_s + MARGIN_OVER_LOAD_S, RECOVERY_LIMIT_S)
        waits = [outage.worst_s for outage in self.outages if outage.num_kills == 1]
        return [f"{wait:.1f} s from kill to next token, target {limit_s:.1f} s" for wait in waits if wait > limit_s]

    def failures(self) -> list[str]:
        found = [f"{len(self.lost)} of {self.streams} streams lost: {self.lost[0]}"] if self.lost else []
        found += [f"{len(self.different)} outcomes differ: {self.different[0]}"] if self.different else []
        found += [f"a drained server ended with {status}" for status in self.drains if status]
        too_many = [kill for kill in self.kills if kill.in_a_row >= MAX_IN_A_ROW]
        return found + ([f"more kills in a row than are promised to be harmless: {too_many}"] if too_many else [])


def outages(kill_times_s: Sequence[float], streams: Sequence[Sequence[float]]) -> list[Outage]:
    """Finds the outages. `streams`: the arrival times of each stream's events. If no client received a token between
    two kills, both belong to one outage, which begins with the first kill."""
    arrivals = sorted(arrival for stream in streams for arrival in stream)
    groups: list[list[float]] = []
    for at_s in sorted(kill_times_s):
        if groups and bisect_right(arrivals, groups[-1][-1] + IN_FLIGHT_S) >= bisect_left(arrivals, at_s):
            groups[-1].append(at_s)
        else:
            groups.append([at_s])
    found = [Outage(len(group), tuple(waits(group, streams))) for group in groups]
    return [outage for outage in found if outage.waits_s]


def waits(group: Sequence[float], streams: Sequence[Sequence[float]]) -> Iterator[float]:
    """Seconds from the first kill of a group to the first event after the last one, for each running stream."""
    for stream in streams:
        after = bisect_right(stream, group[-1] + IN_FLIGHT_S)
        if bisect_right(stream, group[0]) and after < len(stream):
            yield stream[after] - group[0]


def kill_from_outside(scale: Scale, num_shard: int, num_kills: int, num_drains: int, seed: int) -> KilledOutside:
    """Kills shards of `num_drains` servers while they drain, then shards of one server at any time. Without kills this
    last server gives all answers before, and each text of best_of again afterwards."""
    asked = mixed_asks(scale.num_streams, scale.mixed_tokens)
    record = Record(asked)
    rng = random.Random(seed)
    for _ in range(num_drains):
        with scale.server(num_shard, *ARGUMENTS) as server:
            killer = KillerProcess(
                server, shards=num_shard, kills=DRAIN_KILLS, seed=rng.randrange(2**31), longest=DRAIN_LONGEST_S
            )
            clients = StreamClients(asked, scale.num_streams)
            asyncio.run(record.kill_while_draining(server, clients, killer, rng.uniform(*DRAIN_AFTER_S)))
    with scale.server(num_shard, *ARGUMENTS) as server:
        record.expected = undisturbed_answers(server.url, asked)
        killer = KillerProcess(server, shards=num_shard, kills=num_kills, seed=seed, longest=scale.longest_gap_s)
        asyncio.run(record.kill_at_any_time(server, StreamClients(asked, scale.num_streams), killer))
        record.ask_again(server.url)
        record.take_log(server.log())
        return record.result(num_shard, seed, logs.load_time_s(server.log()))


class Record:
    """Collects kills, answers and logs while shards die, and computes the result from them."""

    def __init__(self, asked: Sequence[Ask], expected: Sequence[StreamAnswer] = ()) -> None:
        self.expected = expected
        self._asked = asked
        self._answers: list[StreamAnswer] = []
        self._kills: list[Kill] = []
        self._drained: list[Kill] = []
        self._statuses: list[int] = []
        self._loads: list[tuple[float, float]] = []  # (start of shards, end of warm-up)
        self._different: list[str] = []

    async def kill_at_any_time(self, server: ServerProcess, clients: StreamClients, killer: "KillerProcess") -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(clients.again_and_again(server.url))
            self._kills += await killer.kills()
            clients.finish()
        self._answers += clients.answers

    async def kill_while_draining(
        self, server: ServerProcess, clients: StreamClients, killer: "KillerProcess", after_s: float
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            streams = tasks.create_task(clients.again_and_again(server.url))
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
        self._loads += logs.loads(log)

    def ask_again(self, url: str) -> None:
        """Requests each text of best_of again, while no shard is killed."""
        self._different += ask_again(url, self._asked, self._answers)

    def result(self, num_shard: int, seed: int, load_s: float) -> KilledOutside:
        asked = self._asked
        lost, different = differences(asked, self.expected, self._answers)
        return KilledOutside(
            num_shard=num_shard,
            seed=seed,
            kills=self._kills,
            moments=Counter(self._moment(kill) for kill in self._kills),
            with_enough=sum(len(self._under_way(kill.at_s)) >= UNDER_WAY for kill in self._kills),
            streams=len(self._answers),
            longest_s=max(stream.ended_s - stream.started_s for stream in self._answers),
            kinds=Counter(asked[stream.ask].kind for stream in self._answers),
            lost=[f"{asked[stream.ask].kind}: {stream.error}" for stream in lost],
            different=[*self._different, *different],
            drains=self._statuses,
            outages=outages(self._times(), [s.arrivals_s for s in self._answers if not asked[s.ask].is_slow]),
            load_s=load_s,
        )

    def _times(self) -> list[float]:
        """Times of the kills that did not happen on a draining server."""
        return [kill.at_s for kill in self._kills if kill not in self._drained]

    def _under_way(self, at_s: float) -> list[StreamAnswer]:
        return [stream for stream in self._answers if stream.started_s < at_s < stream.ended_s]

    def _moment(self, kill: Kill) -> str:
        """The moment of a kill (one of MOMENTS), found from the server's log, the server's metrics and the clients'
        times."""
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
        since."""
        return any(
            stream.started_s < ready_s < at_s < stream.ended_s
            and stream.arrivals_s
            and not self._asked[stream.ask].is_slow
            and bisect_right(stream.arrivals_s, ready_s) == bisect_left(stream.arrivals_s, at_s)
            for stream in self._answers
        )


class KillerProcess:
    """Runs killer.py in another process, with the flags `options`. May be used once."""

    def __init__(self, server: ServerProcess, **options: float | str) -> None:
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


def as_markdown(killed: Sequence[KilledOutside], longest_gap_s: float) -> str:
    gaps = f"Bursts of kills up to {longest_gap_s:g} s apart."
    return on_this_machine(gaps, _outside_table(killed), _moments_table(killed), _recovery_table(killed))


def _outside_table(killed: Sequence[KilledOutside]) -> str:
    """The table of shards killed by another process: the kills, and the streams that were lost or differ."""
    rows = []
    for result in killed:
        bursts = Counter(size for _, size in {(kill.burst, kill.size) for kill in result.kills})
        limited = [kill.waited_s for kill in result.kills if kill.waited_s]
        rows.append(
            [
                *(result.num_shard, result.seed, len(result.kills), result.with_enough),
                ", ".join(f"{bursts[size]} × {size}" for size in sorted(bursts)),
                sum(len(kill.ranks) > 1 for kill in result.kills),
                f"{max((kill.in_a_row for kill in result.kills), default=0)} ({len(limited)} × waited)",
                *(result.streams, len(result.lost), len(result.different), f"{result.longest_s:.0f}"),
            ]
        )
    head = f"shards|seed|kills|with ≥ {UNDER_WAY} streams|bursts × kills|of all ranks|most in a row (< {MAX_IN_A_ROW})"
    return table(f"{head}|streams|lost|different|longest stream, s", rows)


def _moments_table(killed: Sequence[KilledOutside]) -> str:
    rows = [[result.num_shard, *(result.moments.get(moment, 0) for moment in MOMENTS)] for result in killed]
    return table("|".join(["shards", *(f"kills in {moment}" for moment in MOMENTS)]), rows)


def _recovery_table(killed: Sequence[KilledOutside]) -> str:
    rows = []
    for result in killed:
        for label, waits in (
            ("one kill", _all_waits(result, lambda n: n == 1)),
            ("several", _all_waits(result, lambda n: n > 1)),
        ):
            if waits:
                times = [f"{median(waits):.1f}", f"{max(waits):.1f}"]
                rows.append([result.num_shard, label, f"{result.load_s:.1f}", *times])
    return table("shards|outages of|load s|recovery s, median|worst", rows)


def _all_waits(result: KilledOutside, wanted: Callable[[int], bool]) -> list[float]:
    return [wait for outage in result.outages if wanted(outage.num_kills) for wait in outage.waits_s]
