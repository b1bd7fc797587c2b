"""Measures the effect of an assault on another tenant: first-token times, times of /live, and the router's memory."""

import asyncio
import http.client
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

import httpx
import processes
import psutil
from calls import client_of, events_of
from server_process import ServerProcess

PROMPT = "Once upon a time there was a fox"
TOKENS = 4
PATIENCE_S = 60.0
LIVE_EVERY_S = 0.02
MEMORY_EVERY_S = 0.1
MIB = 1 << 20


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that is not exceeded by at least the fraction `share` of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


async def first_token_s(client: httpx.AsyncClient, prompt: str = PROMPT, tokens: int = TOKENS) -> float:
    """Seconds until the first token of a stream; infinite if no token came."""
    started_s = time.perf_counter()
    parameters = {"max_new_tokens": tokens, "ignore_eos_token": True}
    try:
        body = {"inputs": prompt, "parameters": parameters}
        async with client.stream("POST", "/generate_stream", json=body) as response:
            first_s = math.inf
            async for event in events_of(response):
                if "token" not in event:
                    return math.inf
                first_s = min(first_s, time.perf_counter() - started_s)
            return first_s
    except httpx.HTTPError:
        return math.inf


def _with_client(url: str, key: str, call: Callable[[httpx.AsyncClient], Awaitable[list[float]]]) -> list[float]:
    async def run() -> list[float]:
        async with client_of(url) as client:
            client.timeout = httpx.Timeout(PATIENCE_S)
            client.headers["authorization"] = f"Bearer {key}"
            return await call(client)

    return asyncio.run(run())


def alone(url: str, key: str, count: int, prompts: Callable[[int], str] = lambda _: PROMPT, tokens: int = TOKENS):
    """First-token times of requests sent one after the other."""

    async def call(client: httpx.AsyncClient) -> list[float]:
        return [await first_token_s(client, prompts(i), tokens) for i in range(count)]

    return _with_client(url, key, call)


def regularly(url: str, key: str, count: int, every_s: float) -> list[float]:
    """First-token times of requests that start at fixed times, even if earlier requests have not been answered."""

    async def call(client: httpx.AsyncClient) -> list[float]:
        asked = []
        for _ in range(count):
            asked.append(asyncio.create_task(first_token_s(client)))
            await asyncio.sleep(every_s)
        return list(await asyncio.gather(*asked))

    return _with_client(url, key, call)


def step_s(url: str, key: str, prompt: str, count: int = 5) -> float:
    """Seconds of the longest step: the first-token time of a prompt that fills a step's whole budget, without other
    requests."""
    return percentile(alone(url, key, count, lambda i: f"{i} {prompt}", 1), 0.5)


class Watch:
    """Calls /live fifty times a second in a thread, and samples the memory of the router and its children."""

    def __init__(self, server: ServerProcess) -> None:
        self.live_s: list[float] = []
        self.bytes: list[int] = []
        self._server = server
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._ask_live, self._sample_memory)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _ask_live(self) -> None:
        client = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=PATIENCE_S)
        while not self._ended.wait(LIVE_EVERY_S):
            started_s = time.perf_counter()
            try:
                client.request("GET", "/live")
                answer = client.getresponse()
                answer.read()
                self.live_s.append(time.perf_counter() - started_s if answer.status == 200 else math.inf)
            except (OSError, http.client.HTTPException):
                self.live_s.append(math.inf)
                client.close()  # the next request opens a new connection
        client.close()

    def _sample_memory(self) -> None:
        while not self._ended.wait(MEMORY_EVERY_S):
            self.bytes.append(router_bytes(self._server))


def router_bytes(server: ServerProcess) -> int:
    """Resident bytes of the router and all its descendants; 0 while there is no router."""
    try:
        router = processes.router(server.pid)
        return sum(processes.resident(process) for process in [router, *router.children(recursive=True)])
    except (LookupError, psutil.Error):
        return 0
