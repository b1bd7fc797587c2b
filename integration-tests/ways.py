"""Answers to the same requests, computed in several ways: alone, in a crowd, in chunks, preempted, after kills."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import processes
from asks import Ask
from calls import client_of, metrics
from server_process import ServerProcess
from streams import StreamAnswer, answer_of, differences

AT_ONCE = 24
MAX_SHOWN = 5
SMALL = ("--max-batch-total-tokens", "2100", "--max-total-tokens", "2048", "--max-batch-prefill-tokens", "64")
COUNTED = {
    "preempted": "tgi_request_preemptions",
    "resumed": "tgi_request_resumes",
    "began after a wait for a slot": 'tgi_queue_waits{reason="adapter"}',
}


@dataclass(frozen=True)
class Way:
    name: str
    flags: tuple[str, ...]
    at_once: int = AT_ONCE
    kill_every: int = 0  # answers between two kills of a shard; 0: none is killed
    shows: tuple[str, ...] = ()  # keys of COUNTED: what the way is for, so that it fails if this did not happen


async def answers_to(
    url: str, asked: Sequence[Ask], at_once: int, on_answer: Callable[[int], None]
) -> list[StreamAnswer]:
    turns, done = asyncio.Semaphore(at_once), 0

    async def one(client: httpx.AsyncClient, place: int) -> StreamAnswer:
        nonlocal done
        async with turns:
            answer = await answer_of(client, asked, place)
        done += 1
        on_answer(done)
        return answer

    async with client_of(url) as client:
        client.timeout = httpx.Timeout(600.0)
        return list(await asyncio.gather(*(one(client, place) for place in range(len(asked)))))


def run(way: Way, asked: Sequence[Ask], flags: Sequence[str]) -> tuple[list[StreamAnswer], str]:
    """The answers, and what was done meanwhile. `flags` come before those of the way. RuntimeError if what the way
    shows did not happen."""
    flags = ["--dtype", "float32", *flags, "--max-concurrent-requests", "64", *way.flags]
    kills, started_s = 0, time.monotonic()
    with ServerProcess(*flags) as server:

        def kill_in_turn(done: int) -> None:
            nonlocal kills
            if not way.kill_every or done % way.kill_every:
                return
            found = processes.engines(server.pid) if "--replicas" in way.flags and kills % 2 else None
            victims = found or (processes.shards_of_replicas if "--replicas" in way.flags else processes.shards)(
                server.pid
            )
            if victims:
                kills += 1
                victims[sorted(victims)[kills % len(victims)]].kill()

        answers = asyncio.run(answers_to(server.url, asked, way.at_once, kill_in_turn))
        counted = metrics(server.url, *COUNTED.values())
    for name, count in zip(COUNTED, counted, strict=True):
        if name in way.shows and not count:
            raise RuntimeError(f"{way.name}: no request {name}, so nothing was shown: more requests are needed")
    done = [f"{int(count)} {what}" for what, count in zip(COUNTED, counted, strict=True)]
    return answers, f"{kills} kills, {', '.join(done)}, {time.monotonic() - started_s:.0f} s"


def compare(ways: Sequence[Way], asked: Sequence[Ask], flags: Sequence[str]) -> int:
    """Prints a line for each way. Returns the number of answers that failed, or are not those of the first way."""
    expected: list[StreamAnswer] = []
    differ = 0
    for way in ways:
        answers, what = run(way, asked, flags)
        expected = expected or answers
        failed, different = differences(asked, expected, answers)
        differ += len(failed) + len(different)
        print(f"{way.name}: {len(answers)} answers, {len(failed)} failed, {len(different)} differ; {what}", flush=True)
        for line in [*(answer.error for answer in failed), *different][:MAX_SHOWN]:
            print(f"  {line[:400]}", flush=True)
    return differ
