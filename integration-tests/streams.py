"""Many streams at once, and the comparison of the answers that their clients receive with a run without faults."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from calls import client_of, events_of

T = TypeVar("T")

WORDS = [
    "fox",
    "lamp",
    "river",
    "village",
    "old",
    "red",
    "lost",
    "found",
    "under",
    "near",
    "27",
    "because",
    "and",
    "the",
]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one stream of exactly `new_tokens` tokens: greedy, or sampled with `seed`."""

    prompt: str
    seed: int | None
    new_tokens: int

    def body(self) -> dict[str, Any]:
        # The end-of-text token is ignored: a stream must be long enough for the faults of the run.
        parameters = {"max_new_tokens": self.new_tokens, "ignore_eos_token": True, "details": True}
        if self.seed is not None:
            parameters |= {"seed": self.seed, **SAMPLED}
        return {"inputs": self.prompt, "parameters": parameters}


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """The answer of one stream. `error` is empty if the stream ended normally."""

    ids: tuple[int, ...]
    arrivals_s: tuple[float, ...]  # arrival time of each id by the wall clock, which the server's log uses too
    text: str
    details: str  # finish reason, number of tokens, seed and prompt length, from the last event
    error: str


@dataclass(frozen=True, slots=True)
class Comparison:
    streams: int
    lost: int  # number of streams that did not end normally
    wrong_tokens: int  # number of positions whose token id differs, is missing or is extra
    other_texts: int  # number of streams whose text or details differ
    first_error: str

    @property
    def is_equal(self) -> bool:
        return not (self.lost or self.wrong_tokens or self.other_texts)


def asks(count: int, new_tokens: int) -> list[Ask]:
    """`count` requests, the same in every run; every second request is sampled. Each prompt is different and has about
    10 to 90 tokens.
    """
    rng = random.Random(1)
    prompts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(8, 60))) for _ in range(count)]
    return [Ask(f"{i}: {prompt}", i if i % 2 else None, new_tokens) for i, prompt in enumerate(prompts)]


class StreamClients:
    """The clients of all requests. The first `num_early` streams start together. The others start one by one as the
    number of received tokens grows, so that new prompts arrive nearly all of the time.
    """

    def __init__(self, asked: Sequence[Ask], num_early: int) -> None:
        self.num_tokens = 0  # number of tokens received by all streams together
        self._asked = asked
        self._num_early = num_early
        self._num_early_running = num_early

    async def run(self, client: httpx.AsyncClient) -> list[StreamAnswer]:
        async with asyncio.timeout(LIMIT_S):
            early = [self._run_early(client, ask) for ask in self._asked[: self._num_early]]
            late = [self._run_late(client, ask, i) for i, ask in enumerate(self._asked[self._num_early :])]
            return list(await asyncio.gather(*early, *late))

    async def wait_for_tokens(self, num_tokens: int) -> None:
        """Waits until all streams together have received `num_tokens` tokens, or the early streams have ended."""
        while self.num_tokens < num_tokens and self._num_early_running:
            await asyncio.sleep(0.02)

    async def _run_early(self, client: httpx.AsyncClient, ask: Ask) -> StreamAnswer:
        try:
            return await self._receive(client, ask)
        finally:
            self._num_early_running -= 1

    async def _run_late(self, client: httpx.AsyncClient, ask: Ask, i: int) -> StreamAnswer:
        early_tokens = sum(ask.new_tokens for ask in self._asked[: self._num_early])
        await self.wait_for_tokens(early_tokens * (i + 1) // (len(self._asked) - self._num_early + 1))
        return await self._receive(client, ask)

    async def _receive(self, client: httpx.AsyncClient, ask: Ask) -> StreamAnswer:
        events: list[Any] = []
        arrivals: list[float] = []
        error = ""
        try:
            async with client.stream("POST", "/generate_stream", json=ask.body()) as response:
                async for event in events_of(response):
                    events.append(event)
                    arrivals.append(time.time())
                    self.num_tokens += 1
        except httpx.HTTPError as broken:
            error = f"{type(broken).__name__}: {broken}"
        return _answer_of(events, arrivals, error)


def _answer_of(events: list[Any], arrivals: list[float], error: str) -> StreamAnswer:
    tokens = [event for event in events if "token" in event]
    last = events[-1] if events else {}
    if not error and not last.get("details"):
        error = str(last.get("error", "the stream ended before its text did"))
    ids = tuple(event["token"]["id"] for event in tokens)
    numbered = [event["index"] for event in tokens] == list(range(1, len(tokens) + 1))
    if not error and not numbered:
        error = "the events are not numbered 1, 2, 3, …"
    # `cached_tokens` is left out: it depends on earlier requests.
    details = {name: value for name, value in (last.get("details") or {}).items() if name != "cached_tokens"}
    return StreamAnswer(ids, tuple(arrivals[: len(ids)]), last.get("generated_text") or "", str(details), error)


def compare(expected: Sequence[StreamAnswer], answers: Sequence[StreamAnswer]) -> Comparison:
    pairs = list(zip(expected, answers, strict=True))
    errors = [stream.error for stream in answers if stream.error]
    return Comparison(
        streams=len(pairs),
        lost=len(errors),
        wrong_tokens=sum(_wrong_tokens(one.ids, other.ids) for one, other in pairs),
        other_texts=sum((one.text, one.details) != (other.text, other.details) for one, other in pairs),
        first_error=errors[0] if errors else "",
    )


def _wrong_tokens(expected: Sequence[int], received: Sequence[int]) -> int:
    differing = sum(one != other for one, other in zip(expected, received, strict=False))
    return differing + abs(len(expected) - len(received))


def run_streams(
    url: str, asked: Sequence[Ask], num_early: int, meanwhile: Callable[[StreamClients], Awaitable[T]] | None = None
) -> tuple[list[StreamAnswer], T | None]:
    """Runs all streams and `meanwhile` at the same time. Returns (the answers of all streams, the result of
    `meanwhile`).
    """

    async def run() -> tuple[list[StreamAnswer], T | None]:
        clients = StreamClients(asked, num_early)
        async with client_of(url) as client, asyncio.TaskGroup() as tasks:
            streams = tasks.create_task(clients.run(client))
            beside = tasks.create_task(_awaited(meanwhile(clients))) if meanwhile else None
        return streams.result(), beside.result() if beside else None

    return asyncio.run(run())


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable
