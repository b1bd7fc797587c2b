"""Many streams of text at once, what a client hears of each, and whether it is what it would have heard in peace."""

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
    """One stream of exactly `new_tokens` tokens: greedy, or sampled with `seed`."""

    prompt: str
    seed: int | None
    new_tokens: int

    def body(self) -> dict[str, Any]:
        # Without the end of text: a stream must be long enough for what happens to it.
        parameters = {"max_new_tokens": self.new_tokens, "ignore_eos_token": True, "details": True}
        if self.seed is not None:
            parameters |= {"seed": self.seed, **SAMPLED}
        return {"inputs": self.prompt, "parameters": parameters}


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of one stream. `error` is empty when it ended as it should."""

    ids: tuple[int, ...]
    arrivals_s: tuple[float, ...]  # of each id, by the wall clock, which the log uses as well
    text: str
    details: str  # finish reason, number of tokens, seed and prompt length, as the last event has them
    error: str


@dataclass(frozen=True, slots=True)
class Comparison:
    streams: int
    lost: int  # that did not end as they should
    wrong_tokens: int  # places where the id differs, is missing, or is one too many
    other_texts: int  # streams whose text or details differ
    first_error: str

    @property
    def is_equal(self) -> bool:
        return not (self.lost or self.wrong_tokens or self.other_texts)


def asks(count: int, new_tokens: int) -> list[Ask]:
    """As many every time; every second one is sampled. Prompts of about 10 to 90 tokens, no two the same."""
    rng = random.Random(1)
    prompts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(8, 60))) for _ in range(count)]
    return [Ask(f"{i}: {prompt}", i if i % 2 else None, new_tokens) for i, prompt in enumerate(prompts)]


class Crowd:
    """The first `num_early` of the asks start together; the rest one by one, as the tokens heard grow in number, so
    that there are new prompts nearly all of the time."""

    def __init__(self, asked: Sequence[Ask], num_early: int) -> None:
        self.num_tokens = 0  # heard by all streams together
        self._asked = asked
        self._num_early = num_early
        self._num_early_running = num_early

    async def run(self, client: httpx.AsyncClient) -> list[Heard]:
        async with asyncio.timeout(LIMIT_S):
            early = [self._run_early(client, ask) for ask in self._asked[: self._num_early]]
            late = [self._run_late(client, ask, i) for i, ask in enumerate(self._asked[self._num_early :])]
            return list(await asyncio.gather(*early, *late))

    async def heard(self, num_tokens: int) -> None:
        """Waits for that many tokens in total, or for the end of the early streams."""
        while self.num_tokens < num_tokens and self._num_early_running:
            await asyncio.sleep(0.02)

    async def _run_early(self, client: httpx.AsyncClient, ask: Ask) -> Heard:
        try:
            return await self._listen(client, ask)
        finally:
            self._num_early_running -= 1

    async def _run_late(self, client: httpx.AsyncClient, ask: Ask, i: int) -> Heard:
        early_tokens = sum(ask.new_tokens for ask in self._asked[: self._num_early])
        await self.heard(early_tokens * (i + 1) // (len(self._asked) - self._num_early + 1))
        return await self._listen(client, ask)

    async def _listen(self, client: httpx.AsyncClient, ask: Ask) -> Heard:
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
        return _heard(events, arrivals, error)


def _heard(events: list[Any], arrivals: list[float], error: str) -> Heard:
    tokens = [event for event in events if "token" in event]
    last = events[-1] if events else {}
    if not error and not last.get("details"):
        error = str(last.get("error", "the stream ended before its text did"))
    ids = tuple(event["token"]["id"] for event in tokens)
    numbered = [event["index"] for event in tokens] == list(range(1, len(tokens) + 1))
    if not error and not numbered:
        error = "the events are not numbered 1, 2, 3, …"
    # What was found in the cache depends on who came before.
    details = {name: value for name, value in (last.get("details") or {}).items() if name != "cached_tokens"}
    return Heard(ids, tuple(arrivals[: len(ids)]), last.get("generated_text") or "", str(details), error)


def compare(expected: Sequence[Heard], heard: Sequence[Heard]) -> Comparison:
    pairs = list(zip(expected, heard, strict=True))
    errors = [stream.error for stream in heard if stream.error]
    return Comparison(
        streams=len(pairs),
        lost=len(errors),
        wrong_tokens=sum(_wrong_tokens(one.ids, other.ids) for one, other in pairs),
        other_texts=sum((one.text, one.details) != (other.text, other.details) for one, other in pairs),
        first_error=errors[0] if errors else "",
    )


def _wrong_tokens(expected: Sequence[int], heard: Sequence[int]) -> int:
    differing = sum(one != other for one, other in zip(expected, heard, strict=False))
    return differing + abs(len(expected) - len(heard))


def listen(
    url: str, asked: Sequence[Ask], num_early: int, meanwhile: Callable[[Crowd], Awaitable[T]] | None = None
) -> tuple[list[Heard], T | None]:
    """What is heard of all streams, and what `meanwhile`, which runs beside them, returns."""

    async def run() -> tuple[list[Heard], T | None]:
        crowd = Crowd(asked, num_early)
        async with client_of(url) as client, asyncio.TaskGroup() as tasks:
            streams = tasks.create_task(crowd.run(client))
            beside = tasks.create_task(_awaited(meanwhile(crowd))) if meanwhile else None
        return streams.result(), beside.result() if beside else None

    return asyncio.run(run())


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable
