"""Two clients of one server: a greedy one with many requests at once, and a modest one with one request at a time."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
from calls import client_of
from server_process import wait_until

LIMIT_S = 120.0
NUM_MODEST = 12


def body_of(prompt: str, new_tokens: int) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": new_tokens, "ignore_eos_token": True}}


async def greedy_answers_meanwhile(
    url: str, num_greedy: int, is_crowded: Callable[[], bool], modest_tenant: str = "modest"
) -> list[int]:
    """For each request of the modest client: how many answers the greedy client gets while the modest one waits. The
    greedy client keeps `num_greedy` requests open. `is_crowded`: whether enough of them wait in the server's queue. A
    server without turns answers these first."""
    answered, is_over = 0, False

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        nonlocal answered
        # Texts have different lengths, so that a text ends in nearly every step. They are so long that the server, and
        # not this client, is what requests wait for.
        body = body_of(f"{number} of many", 160 + number % 16)
        while not is_over:
            (await client.post("/generate", json=body, headers={"X-Tenant": "greedy"})).raise_for_status()
            answered += 1

    def modest() -> list[int]:
        """Asks for one token each, with a connection of its own: fronts share connections out."""
        counts = []
        for number in range(NUM_MODEST):
            wait_until(is_crowded, LIMIT_S, "a long queue of the greedy client")
            with httpx.Client(
                base_url=url, headers={"X-Tenant": modest_tenant}, timeout=LIMIT_S, verify=False
            ) as client:
                before = answered
                client.post("/generate", json=body_of(f"{number} and no more", 1)).raise_for_status()
                counts.append(answered - before)
        return counts

    async with client_of(url) as client, asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask(client, number)) for number in range(num_greedy)]
        # The modest client runs in a thread of its own, because the many requests keep this event loop busy.
        counts = await asyncio.to_thread(modest)
        is_over = True
        for _ in range(100):  # a request that is just being sent would leave its connection open
            await asyncio.sleep(0)
        for task in asking:
            task.cancel()
    return counts
