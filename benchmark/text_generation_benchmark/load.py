"""A load generator with little overhead: raw HTTP/1.1 over asyncio, one connection per stream."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol

import orjson
import uvloop

from text_generation_benchmark.figures import percentile

GREEDY: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Seconds from sending a request to its first and to its last piece of text."""

    first: float
    last: float
    tokens: int
    gaps: tuple[float, ...] = ()  # seconds from each piece of text to the next
    usage: Mapping[str, Any] | None = None  # what the server states at the end

    @property
    def per_token(self) -> float:
        """Mean seconds from one token to the next, from the first token on."""
        return (self.last - self.first) / max(1, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadResult:
    streams: tuple[StreamTimes, ...]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(stream.tokens for stream in self.streams) / self.wall_s

    @property
    def per_token_s(self) -> float:
        """Median of the streams' mean seconds per token."""
        return sorted(stream.per_token for stream in self.streams)[len(self.streams) // 2]

    @property
    def first_token_s(self) -> float:
        return sorted(stream.first for stream in self.streams)[len(self.streams) // 2]

    def gap_s(self, share: float) -> float:
        """The gap between two pieces of text that `share` of all gaps of all streams do not exceed; 0 without gaps."""
        return percentile(sorted(gap for stream in self.streams for gap in stream.gaps), 100 * share)


@dataclass(frozen=True, slots=True)
class Event:
    tokens: int  # least number of tokens that came with the event
    total: int | None = None  # number of tokens of the whole stream, if this event states it
    usage: Mapping[str, Any] | None = None


class Dialect(Protocol):
    """A protocol of a server: how to request a stream of tokens, and how to read its events. `sampling` is the sampling
    parameters by name; none for greedy tokens."""

    @property
    def path(self) -> str: ...

    def body(self, prompt: str, new_tokens: int, sampling: Mapping[str, float] = GREEDY) -> dict[str, Any]: ...

    def read(self, event: dict[str, Any], new_tokens: int) -> Event: ...


class GenerateStream:
    """TGI's route /generate_stream: each event is one token."""

    path = "/generate_stream"

    def body(self, prompt: str, new_tokens: int, sampling: Mapping[str, float] = GREEDY) -> dict[str, Any]:
        asked = {"do_sample": True, **sampling} if sampling else {}
        return {"inputs": prompt, "parameters": {"max_new_tokens": new_tokens, "ignore_eos_token": True, **asked}}

    def read(self, event: dict[str, Any], new_tokens: int) -> Event:
        return Event(tokens=1)


@dataclass(frozen=True, slots=True)
class Completions:
    """OpenAI's route. One event may hold several tokens, so the number that the server states at the end counts: the
    usage or, if the server sends none in a stream, finish reason "length", which means all tokens asked for."""

    model: str
    options: dict[str, Any]  # further fields of the request
    path: str = "/v1/completions"

    def body(self, prompt: str, new_tokens: int, sampling: Mapping[str, float] = GREEDY) -> dict[str, Any]:
        fixed = {"model": self.model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True}
        return fixed | self.options | dict(sampling)

    def read(self, event: dict[str, Any], new_tokens: int) -> Event:
        choice = (event.get("choices") or [{"finish_reason": "none"}])[0]
        finish_reason = choice.get("finish_reason")
        total = new_tokens if finish_reason == "length" else None
        usage = event.get("usage") or None
        if usage is not None:
            total = usage["completion_tokens"]
        # A token that ends within a character has no text yet. The last event has no token of its own at some servers.
        return Event(tokens=1 if choice.get("text") or finish_reason is None else 0, total=total, usage=usage)


class TenMessages:
    """A dialect that sends each prompt as a chat of ten messages, through the model's chat template."""

    path = "/v1/chat/completions"

    def body(self, prompt: str, new_tokens: int, sampling: Mapping[str, float] = GREEDY) -> dict[str, Any]:
        size = -(-len(prompt) // 10)
        texts = [prompt[i * size : (i + 1) * size] for i in range(10)]
        roles = ["system", *["user", "assistant"] * 4, "user"]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        fixed = {"messages": messages, "max_tokens": new_tokens, "temperature": 0, "stream": True}
        return fixed | {"ignore_eos": True} | dict(sampling)

    def read(self, event: dict[str, Any], new_tokens: int) -> Event:
        choices = event["choices"]  # the end is an event of its own where the last token adds no text
        is_whole = any(choice["finish_reason"] == "length" for choice in choices)
        return Event(tokens=len(choices), total=new_tokens if is_whole else None)


DIALECTS: dict[str, Dialect] = {"generate": GenerateStream(), "chat": TenMessages()}


def dialect_of(route: str) -> Dialect:
    """The dialect of a flag's `generate` or `chat`. ValueError for another word."""
    if route not in DIALECTS:
        raise ValueError(f"{route} is not a route that is measured: choose {', '.join(DIALECTS)}")
    return DIALECTS[route]


async def stream_once(
    port: int,
    dialect: Dialect,
    prompt: str,
    new_tokens: int,
    sampling: Mapping[str, float] = GREEDY,
    started: float | None = None,
) -> StreamTimes:
    """Reads one stream. RuntimeError unless the stream has exactly `new_tokens` tokens. Its times count from `started`
    on; by default, from the sending of the request."""
    body = orjson.dumps(dialect.body(prompt, new_tokens, sampling))
    head = f"POST {dialect.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if started is None:
            started = time.perf_counter()
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return await _read_stream(reader, dialect, new_tokens, started)
    finally:
        writer.close()
        await writer.wait_closed()


async def _read_stream(reader: asyncio.StreamReader, dialect: Dialect, new_tokens: int, started: float) -> StreamTimes:
    times: list[float] = []
    tokens, total, usage, other = 0, None, None, b""
    async for line in reader:
        if not line.startswith(b"data: {"):
            other = (other + line)[-2000:]
            continue
        event = dialect.read(_parsed(line), new_tokens)
        total, usage = total if event.total is None else event.total, event.usage or usage
        if event.tokens:
            tokens += event.tokens
            times.append(time.perf_counter() - started)
    made = tokens if total is None else total
    if made != new_tokens or not tokens:
        raise RuntimeError(f"a stream ended after {made} of {new_tokens} tokens: {other.decode(errors='replace')}")
    gaps = tuple(later - earlier for earlier, later in pairwise(times))
    return StreamTimes(times[0], times[-1], made, gaps, usage)


def _parsed(line: bytes) -> dict[str, Any]:
    event: dict[str, Any] = orjson.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise RuntimeError(f"the server refused the load: {line.decode().strip()}")
    return event


def run_load(
    port: int, dialect: Dialect, prompts: list[str], new_tokens: int, sampling: Mapping[str, float] = GREEDY
) -> LoadResult:
    """Sends all prompts at once."""

    async def run() -> list[StreamTimes]:
        return await asyncio.gather(*(stream_once(port, dialect, prompt, new_tokens, sampling) for prompt in prompts))

    started = time.perf_counter()
    streams = uvloop.run(run())
    return LoadResult(tuple(streams), time.perf_counter() - started)
