"""Sends odd grammars, schemas and tools, drawn at random: `make fuzz-grammars`. Prints its seed.

First a checker with its children makes `--count` of them: each is taken, or refused by name. Then a whole server on the
demo model gets others, until it has followed `--follow` of those that compile, for 64 tokens each: no router or shard
dies, and each refusal is a 400."""

import argparse
import asyncio
import itertools
import json
import logging
import random
import sys
import time
from collections import Counter
from typing import Any

import httpx
from calls import DEMO_MODEL
from server_process import ServerProcess

from text_generation_router.errors import GrammarError, OverloadedError
from text_generation_router.scheduling.request import Share
from text_generation_router.text.grammars.asked import GrammarKind
from text_generation_router.text.grammars.checking import CHILDREN, GrammarChecker, children_of
from text_generation_router.text.grammars.tests.random_grammars import Drawn, draw

AT_ONCE, TOKENS, LIMIT_S = 8, 64, 120.0
FIELDS = {
    GrammarKind.JSON_SCHEMA: "guided_json", GrammarKind.REGEX: "guided_regex", GrammarKind.RULES: "guided_grammar",
    GrammarKind.CHOICE: "guided_choice",
}  # fmt: skip


async def check_all(count: int, seed: int) -> "Counter[str]":
    """How the grammars ended. Raises every other error than a refusal, or an answer that the machine is too busy."""
    ends: Counter[str] = Counter()
    children = children_of(DEMO_MODEL, 2048, (0,))
    checker = GrammarChecker(children, 8)

    async def check(owner: int) -> None:
        rng = random.Random(f"{seed} {owner}")
        for _ in range(count // CHILDREN):
            drawn = draw(rng)
            try:
                await checker.grammar(drawn.wanted, Share(owner=f"{owner}"))
            except GrammarError as error:
                ends["not compiled" if "cannot be compiled" in error.text else "refused"] += 1
            except OverloadedError:
                ends["too busy"] += 1
            else:
                ends["taken"] += 1

    try:
        await asyncio.gather(*map(check, range(CHILDREN)))
    finally:
        await children.close()
    return ends


def request_of(drawn: Drawn, seed: int) -> tuple[str, bytes]:
    """The route and the body."""
    body: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 1.0, "seed": seed}
    if drawn.tools is None:
        assert drawn.kind is not None
        value = json.loads(drawn.text) if drawn.kind is GrammarKind.CHOICE else drawn.text
        return "/v1/completions", json.dumps(body | {"prompt": "Once", FIELDS[drawn.kind]: value}).encode()
    functions = [
        {"name": name, "parameters": schema, "strict": name in drawn.strict} for name, schema in drawn.tools.items()
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": "required"}
    return "/v1/chat/completions", json.dumps(body | chat).encode()


async def follow(url: str, wanted: int, seed: int) -> "Counter[str]":
    """How the requests ended: their statuses, or what failed."""
    ends: Counter[str] = Counter()
    rng, numbers = random.Random(f"{seed} followed"), itertools.count()

    async def send(client: httpx.AsyncClient) -> None:
        while ends["200"] < wanted:
            route, body = request_of(draw(rng), next(numbers))
            answer = await client.post(route, content=body, headers={"content-type": "application/json"})
            end = str(answer.status_code)
            if answer.status_code >= 500:
                end = f"{end} {answer.text[:200]} for {body[:500]!r}"
            ends[end] += 1

    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
        await asyncio.gather(*(send(client) for _ in range(AT_ONCE)))
        (await client.get("/health")).raise_for_status()
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50_000, help="grammars that are checked in this process")
    parser.add_argument("--follow", type=int, default=2_000, help="grammars that a server follows")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    asked = parser.parse_args()
    logging.disable(logging.WARNING)  # a line for each child that died
    print(f"seed {asked.seed}", flush=True)
    begun_s = time.monotonic()
    ends = asyncio.run(check_all(asked.count, asked.seed))
    print(f"checked: {dict(ends)} in {time.monotonic() - begun_s:.0f} s", flush=True)
    if not asked.follow:
        return 0
    with ServerProcess("--model-id", str(DEMO_MODEL)) as server:
        ends = asyncio.run(follow(server.url, asked.follow, asked.seed))
        log = server.log()
    deaths = [line for line in log.splitlines() if "was ended by signal" in line]
    print(f"followed: {dict(ends)}, deaths of router or shard: {len(deaths)}", *deaths, sep="\n")
    return int(bool(deaths) or any(end.startswith("5") for end in ends))


if __name__ == "__main__":
    sys.exit(main())
