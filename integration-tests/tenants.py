"""Two clients of one server: a greedy one with many requests at once, and a modest one with one request at a time."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx

# Milliseconds in the queue, and milliseconds until the text was complete.
Waits = tuple[int, int]


def body_of(prompt: str, new_tokens: int) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": new_tokens, "ignore_eos_token": True}}


def waits_of(response: httpx.Response) -> Waits:
    """From an answer's headers."""
    response.raise_for_status()
    return int(response.headers["x-queue-time"]), int(response.headers["x-total-time"])


def greedy_asks(count: int) -> list[Callable[[httpx.AsyncClient], Awaitable[Waits]]]:
    """Requests of the greedy client, with texts of different lengths, so that a text ends in nearly every step."""

    def ask(number: int) -> Callable[[httpx.AsyncClient], Awaitable[Waits]]:
        async def post(client: httpx.AsyncClient) -> Waits:
            body = body_of(f"{number} of many", 64 + number % 16)
            return waits_of(await client.post("/generate", json=body, headers={"X-Tenant": "greedy"}))

        return post

    return list(map(ask, range(count)))


def modest_waits(url: str) -> list[Waits]:
    """Waits of the modest client's requests for one token, each with a connection of its own: fronts share them out."""
    waits = []
    for number in range(12):
        with httpx.Client(base_url=url, headers={"X-Tenant": "modest"}, timeout=60) as client:
            waits.append(waits_of(client.post("/generate", json=body_of(f"{number} and no more", 1))))
    return waits
