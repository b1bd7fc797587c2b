"""Compares the answers to requests for 8 LoRA adapters and for the model, with options of every kind: alone, in a
crowd, in chunks beside each other with preemptions and fewer slots than adapters, resumed after kills, and on two
replicas.

    .venv/bin/python integration-tests/make_adapters.py [--requests 1000]

Prints a line for each way, and ends with status 1 if an answer differs."""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import processes
from asks import Ask, mixed_asks
from calls import client_of, metrics
from server_process import ServerProcess
from streams import StreamAnswer, answer_of, differences

sys.path.insert(0, str(Path(__file__).parents[1] / "server/text_generation_server/tests"))
from adapter_tools import sizes_of, some, write_adapter

from text_generation_common.model_files import demo_directory

ADAPTERS, TOKENS = 8, (6, 24)
AT_ONCE = 24
MAX_SHOWN = 5
SMALL = ["--max-batch-total-tokens", "2600", "--max-total-tokens", "2048", "--max-batch-prefill-tokens", "64"]
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


WAYS = (
    Way("alone", (), at_once=1),
    Way("in a crowd", ()),
    Way("chunks, preempted, 3 slots", ("--max-loras", "3", "--max-cpu-loras", "4", *SMALL)),
    Way("shards killed", ("--max-loras", "5"), kill_every=120),
    Way("2 replicas, engines killed", ("--replicas", "2"), kill_every=250),
)


def asks_of(count: int) -> list[Ask]:
    """`count` requests of all kinds in turn, each for one of the adapters or for the model."""
    draw = random.Random(3)
    return [_asking(ask, draw.choice([*map(name_of, range(ADAPTERS)), None])) for ask in mixed_asks(count, TOKENS)]


def _asking(ask: Ask, adapter: str | None) -> Ask:
    if adapter is None:
        return ask
    if "parameters" in ask.body:
        return replace(ask, body=ask.body | {"parameters": ask.body["parameters"] | {"adapter_id": adapter}})
    return replace(ask, body=ask.body | {"model": adapter})


def name_of(number: int) -> str:
    return f"adapter{number}"


def write_adapters(folder: Path) -> str:
    sizes = sizes_of(demo_directory())
    written = [
        write_adapter(folder / name_of(number), some(sizes, 1 + number % 3), 2 + 3 * number, seed=number, gain=0.1)
        for number in range(ADAPTERS)
    ]
    return ",".join(map(str, written))


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


def run(way: Way, asked: Sequence[Ask], adapters: str) -> tuple[list[StreamAnswer], str]:
    """The answers, and what was done meanwhile."""
    flags = ["--dtype", "float32", "--lora-adapters", adapters, "--max-concurrent-requests", "64", *way.flags]
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
    done = [f"{int(count)} {what}" for what, count in zip(COUNTED, counted, strict=True)]
    return answers, f"{kills} kills, {', '.join(done)}, {time.monotonic() - started_s:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare answers of adapters in every way in which they are computed.")
    parser.add_argument("--requests", type=int, default=1000)
    asked = asks_of(parser.parse_args().requests)
    expected: list[StreamAnswer] = []
    differ = 0
    with TemporaryDirectory() as folder:
        adapters = write_adapters(Path(folder))
        for way in WAYS:
            answers, what = run(way, asked, adapters)
            expected = expected or answers
            failed, different = differences(asked, expected, answers)
            differ += len(failed) + len(different)
            print(
                f"{way.name}: {len(answers)} answers, {len(failed)} failed, {len(different)} differ; {what}", flush=True
            )
            for line in [*(answer.error for answer in failed), *different][:MAX_SHOWN]:
                print(f"  {line[:400]}", flush=True)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
