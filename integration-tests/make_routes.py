"""Sends requests of every route with every field, and compares the answers: `make test-routes`.

Each request is sent to a server with room, one after the other: whole, and as a stream. All requests are sent again to
a server with few token slots and a small step budget, many at a time and whole or streamed by chance, while its shards
and its engine are killed. All answers to a request must be equal. Prints the seed, the counts of drawn fields, of
preemptions and of kills, and each difference with its request. Exit status 1 if there is a difference, or too few
preemptions or kills."""

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import processes
from calls import DEMO_MODEL, client_of, metric
from digest_requests import QUESTION
from route_answers import answer, difference
from route_cases import RouteCase, all_fields, cases, drawn, words
from server_process import ServerProcess

AT_ONCE = 24
OTHERS = 24  # number of clients whose answers are not compared, at most
LIMIT_S = 300.0
BASE = (
    *("--model-id", str(DEMO_MODEL), "--dtype", "float32", "--max-total-tokens", "640", "--max-best-of", "3"),
    *("--max-concurrent-requests", "256", "--enable-prefill-logprobs"),
)
# Room for a few requests of those that run, and steps of a part of a prompt.
CROWDED = (
    *("--max-batch-total-tokens", "1024", "--max-batch-size", str(AT_ONCE + OTHERS)),
    *("--max-batch-prefill-tokens", "48", "--max-queued-tokens", "1000000", "--api-workers", "1"),
)
PAGE_AGE_S = 2.5
# A kill of a shard, of a shard, of an engine, and so on.
VICTIMS = ("shard", "shard", "engine")
MAX_SHOWN = 40


@dataclass(slots=True)
class Crowd:
    """The answers in a crowd, by the number of the case, and what was done to the server meanwhile."""

    answers: dict[int, tuple[bool, Any]] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    num_refused: int
    differences: Sequence[str]
    preemptions: int
    kills: Counter[str]


def compare(made: Sequence[RouteCase], seed: int, num_kills: int, num_others: int = OTHERS) -> Found:
    """All answers to the cases, compared with the whole answers that a server gives one by one."""
    with ServerProcess(*BASE) as roomy, ServerProcess(*BASE, *CROWDED) as crowded:
        alone, crowd = asyncio.run(_ask(roomy, crowded, made, seed, num_kills, num_others))
    found = []
    for number, (case, (whole, stream)) in enumerate(zip(made, alone, strict=True)):
        streamed, crowded_answer = crowd.answers[number]
        told = {"as a stream": difference(case, whole, stream, True) if stream is not None else ""}
        # In a crowd, the same form of the answer is compared.
        told["in a crowd"] = difference(case, stream if streamed else whole, crowded_answer, False)
        shown = json.dumps(case.body)
        found += [f"{case.path} {how}: {what}\n    {shown}" for how, what in told.items() if what]
    refused = sum("refused" in whole for whole, _ in alone)
    return Found(refused, found, crowd.preemptions, crowd.kills)


async def _ask(
    roomy: ServerProcess,
    crowded: ServerProcess,
    made: Sequence[RouteCase],
    seed: int,
    num_kills: int,
    num_others: int,
) -> tuple[list[tuple[Any, Any]], Crowd]:
    async with client_of(roomy.url) as client, asyncio.TaskGroup() as tasks:
        client.timeout = httpx.Timeout(LIMIT_S)
        crowd = tasks.create_task(_in_a_crowd(crowded, made, random.Random(seed), num_kills, num_others))
        alone = []
        for case in made:
            whole = await answer(client, case, False)
            alone.append((whole, await answer(client, case, True) if case.has_stream else None))
    return alone, crowd.result()


async def _in_a_crowd(
    server: ServerProcess, made: Sequence[RouteCase], rng: random.Random, num_kills: int, num_others: int
) -> Crowd:
    crowd, places = Crowd(), iter(range(len(made)))
    forms = [case.has_stream and rng.random() < 0.5 for case in made]
    dues = [len(made) * (number + 1) // (num_kills + 2) for number in range(num_kills)]

    async def send(client: httpx.AsyncClient) -> None:
        for place in places:
            crowd.answers[place] = forms[place], await answer(client, made[place], forms[place])
            if dues and len(crowd.answers) >= dues[0]:
                dues.pop(0)
                await _kill(server, crowd)

    async with client_of(server.url) as client:
        client.timeout = httpx.Timeout(LIMIT_S)
        others = [asyncio.create_task(_crowd_in(client, seed)) for seed in range(num_others)]
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(send(client))
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    crowd.preemptions += await _preemptions(server)
    return crowd


async def _crowd_in(client: httpx.AsyncClient, seed: int) -> None:
    """Asks for texts that are long or short by turns, which the server cannot foresee. It then preempts some."""
    rng = random.Random(seed)
    while True:
        parameters = {"max_new_tokens": rng.randint(100, 300), "ignore_eos_token": True}
        long = {"inputs": words(rng), "parameters": parameters}
        short = {"inputs": QUESTION.format(rng.randint(0, 9), seed), "parameters": {"max_new_tokens": 300}}
        for body in (short, long):
            (await client.post("/generate", json=body)).raise_for_status()


async def _preemptions(server: ServerProcess) -> int:
    """Preemptions since the start of the engine, of which the page of a front tells with some delay."""
    await asyncio.sleep(PAGE_AGE_S)
    return int(await asyncio.to_thread(metric, server.url, "tgi_request_preemptions"))


async def _kill(server: ServerProcess, crowd: Crowd) -> None:
    """Kills the next victim, as soon as it is there."""
    kind = VICTIMS[crowd.kills.total() % len(VICTIMS)]
    crowd.kills[kind] += 1
    if kind == "engine":
        crowd.preemptions += await _preemptions(server)
    for _ in range(int(LIMIT_S)):
        try:
            victim = processes.engine(server.pid) if kind == "engine" else processes.shards(server.pid)[0]
        except LookupError:
            await asyncio.sleep(1)
            continue
        victim.kill()
        return
    raise RuntimeError(f"the {kind} does not come back")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--least-preemptions", type=int, default=200)
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    made = cases(asked.seed, asked.cases)
    counts = drawn(made)
    print("drawn:", ", ".join(f"{name} {counts[name]}" for name in sorted(all_fields() | counts.keys())))
    found = compare(made, asked.seed, asked.kills)
    print(*found.differences[:MAX_SHOWN], sep="\n")
    print(
        f"{len(made)} cases (seed {asked.seed}), {found.num_refused} refused, {len(found.differences)} differences,"
        f" {found.preemptions} preemptions, kills {dict(found.kills)}"
    )
    few = found.preemptions < asked.least_preemptions or found.kills.total() < asked.kills
    return int(bool(found.differences) or few)


if __name__ == "__main__":
    raise SystemExit(main())
