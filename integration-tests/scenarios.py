"""Faults on a server with 64 streams, and what the clients notice of each fault. There is one function for each
fault.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import kills
import processes
from scale import Scale
from server_process import ServerProcess
from streams import Comparison, StreamAnswer, StreamClients, compare, run_streams

UNREADY_LIMIT_S = 6.0
# Number of the step in which the first exception is raised; all streams should run by then. The next exceptions come
# STEPS_BETWEEN_RAISES steps apart, so that the streams make tokens in between.
FIRST_RAISE = 40
STEPS_BETWEEN_RAISES = 8


@dataclass(frozen=True, slots=True)
class Stopped:
    num_shard: int
    unready_s: float
    restarts: int
    comparison: Comparison

    def failures(self) -> list[str]:
        late = self.unready_s > UNREADY_LIMIT_S
        found = _differences(self.comparison)
        found += [f"/ready answered 503 only after {self.unready_s:.1f} s"] if late else []
        return found + ([f"{self.restarts} restarts for one stop"] if self.restarts != 1 else [])


@dataclass(frozen=True, slots=True)
class Raised:
    num_shard: int
    asked: int
    raised: int
    restarts: int
    comparison: Comparison

    def failures(self) -> list[str]:
        expected = 0 if self.num_shard == 1 else self.asked
        found = _differences(self.comparison)
        found += [f"{self.raised} exceptions of {self.asked}"] if self.raised != self.asked else []
        return found + ([f"{self.restarts} restarts instead of {expected}"] if self.restarts != expected else [])


@dataclass(frozen=True, slots=True)
class Terminated:
    unready_s: float
    status: int
    comparison: Comparison

    def failures(self) -> list[str]:
        found = _differences(self.comparison)
        return found + ([f"exit status {self.status}"] if self.status else [])


def undisturbed(scale: Scale, num_shard: int) -> list[StreamAnswer]:
    with scale.server(num_shard) as server:
        answers, _ = run_streams(server.url, scale.asks(), scale.num_streams)
    broken = [stream.error for stream in answers if stream.error]
    if broken:
        raise RuntimeError(f"{len(broken)} streams fail without any fault: {broken[0]}")
    return answers


def stop_shard(scale: Scale, num_shard: int, seed: int, expected: Sequence[StreamAnswer]) -> Stopped:
    with scale.server(num_shard) as server:
        shards = processes.shards(server.pid)
        victim = shards[random.Random(seed).randrange(num_shard)]

        async def stop(clients: StreamClients) -> float:
            await clients.wait_for_tokens(scale.num_streams * scale.new_tokens // 4)
            if not server.is_ready():
                raise RuntimeError("the server is not ready before anything was done to it")
            victim.send_signal(signal.SIGSTOP)
            unready_s = await until_unready(server)
            await until_ready(server)
            return unready_s

        answers, unready_s = run_streams(server.url, scale.asks(), scale.num_streams, stop)
        assert unready_s is not None
        return Stopped(num_shard, unready_s, restarts(server), compare(expected, answers))


def raise_in_steps(scale: Scale, num_shard: int, expected: Sequence[StreamAnswer]) -> Raised:
    """Injects exceptions into steps. A single shard must survive all of them in one process. With several shards, each
    exception ends an epoch.
    """
    asked = scale.exceptions[num_shard]
    first, apart = min(FIRST_RAISE, scale.new_tokens // 3), STEPS_BETWEEN_RAISES
    if num_shard == 1:
        passes = ",".join(str(first + i * apart) for i in range(asked))
        rules = [f"shard.step:raise@{passes}"]
    else:
        passes_of = [first, *[apart] * (asked - 1)]
        rules = [
            f"shard.step[epoch={epoch},rank={num_shard - 1}]:raise@{at}" for epoch, at in enumerate(passes_of, start=1)
        ]
    with scale.server(num_shard, "--testing", environ={"FAILPOINTS": ";".join(rules)}) as server:
        answers, _ = run_streams(server.url, scale.asks()[: scale.num_streams], scale.num_streams)
        raised = [fault for fault in kills.injected(server.log()) if fault.action == "raise"]
        comparison = compare(expected[: scale.num_streams], answers)
        return Raised(num_shard, asked, len(raised), restarts(server), comparison)


def terminate(scale: Scale, expected: Sequence[StreamAnswer]) -> Terminated:
    """Sends SIGTERM to a server with default flags while all early streams run. The late streams are not requested."""
    with scale.server(1) as server:

        async def terminate(clients: StreamClients) -> float:
            await clients.wait_for_tokens(scale.num_streams * 8)
            os.kill(server.pid, signal.SIGTERM)
            return await until_unready(server)

        early = scale.asks()[: scale.num_streams]
        answers, unready_s = run_streams(server.url, early, scale.num_streams, terminate)
        assert unready_s is not None
        return Terminated(unready_s, server.stop(), compare(expected[: scale.num_streams], answers))


async def until_unready(server: ServerProcess, limit_s: float = 60) -> float:
    """Seconds until /ready answers 503. Until then it must answer 200."""
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        started_s = time.monotonic()
        while time.monotonic() - started_s < limit_s:
            status = await _ready_status(client)
            if status == 503:
                return time.monotonic() - started_s
            await asyncio.sleep(0.02)
    raise RuntimeError(f"/ready is not 503 within {limit_s} s")


async def until_ready(server: ServerProcess, limit_s: float = 60) -> None:
    """Waits until /ready answers 200. Until then it must answer 503."""
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        async with asyncio.timeout(limit_s):
            while await _ready_status(client) != 200:
                await asyncio.sleep(0.02)


async def _ready_status(client: httpx.AsyncClient) -> int:
    try:
        status = (await client.get("/ready")).status_code
    except httpx.TransportError as error:
        raise RuntimeError(f"/ready is not answered: {type(error).__name__}") from error
    if status not in (200, 503):
        raise RuntimeError(f"/ready says {status}")
    return status


def restarts(server: ServerProcess) -> int:
    """Number of restarts of the shard group since the server started."""
    return max(processes.epoch(shard) for shard in processes.shards(server.pid).values()) - 1


def _differences(comparison: Comparison) -> list[str]:
    if comparison.is_equal:
        return []
    return [
        f"of {comparison.streams} streams {comparison.lost} lost ({comparison.first_error}), {comparison.other_texts}"
        f" with another text, {comparison.wrong_tokens} tokens missing, doubled or others"
    ]
