"""A load generator that costs little: raw HTTP/1.1 over asyncio, one connection per stream, for any of the servers."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
import uvloop


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Seconds after the request was sent, of the first and the last piece of text."""

    first: float
    last: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Between the first token and the last."""
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
        """Median over streams."""
        return sorted(stream.per_token for stream in self.streams)[len(self.streams) // 2]

    @property
    def first_token_s(self) -> float:
        return sorted(stream.first for stream in self.streams)[len(self.streams) // 2]


@dataclass(frozen=True, slots=True)
class Event:
    tokens: int  # at least so many came with it
    total: int | None = None  # of the whole stream, where the server says it


class Dialect(Protocol):
    """How a server is asked for a stream of greedy tokens, and what its events say."""

    @property
    def path(self) -> str: ...

    def body(self, prompt: str, new_tokens: int) -> dict[str, Any]: ...

    def read(self, event: dict[str, Any], new_tokens: int) -> Event: ...


class GenerateStream:
    """TGI's route: one token an event."""

    path = "/generate_stream"

    def body(self, prompt: str, new_tokens: int) -> dict[str, Any]:
        return {"inputs": prompt, "parameters": {"max_new_tokens": new_tokens, "ignore_eos_token": True}}

    def read(self, event: dict[str, Any], new_tokens: int) -> Event:
        return Event(tokens=1)


@dataclass(frozen=True, slots=True)
class Completions:
    """OpenAI's route. An event may hold several tokens, so what counts is what the server says at the end.

    That is the usage, or, where a server has none in a stream, that the text ended because of its length.
    """

    model: str
    options: dict[str, Any]  # what only this server knows
    path: str = "/v1/completions"

    def body(self, prompt: str, new_tokens: int) -> dict[str, Any]:
        fixed = {"model": self.model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True}
        return fixed | self.options

    def read(self, event: dict[str, Any], new_tokens: int) -> Event:
        choices = event.get("choices") or [{}]
        total = new_tokens if choices[0].get("finish_reason") == "length" else None
        if event.get("usage"):
            total = event["usage"]["completion_tokens"]
        return Event(tokens=1 if choices[0].get("text") else 0, total=total)


async def stream_once(port: int, dialect: Dialect, prompt: str, new_tokens: int) -> StreamTimes:
    """RuntimeError unless exactly `new_tokens` tokens come."""
    body = orjson.dumps(dialect.body(prompt, new_tokens))
    head = f"POST {dialect.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        started = time.perf_counter()
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return await _read_stream(reader, dialect, new_tokens, started)
    finally:
        writer.close()
        await writer.wait_closed()


async def _read_stream(reader: asyncio.StreamReader, dialect: Dialect, new_tokens: int, started: float) -> StreamTimes:
    first = last = 0.0
    tokens, total, other = 0, None, b""
    async for line in reader:
        if not line.startswith(b"data: {"):
            other = (other + line)[-2000:]
            continue
        event = dialect.read(_parsed(line), new_tokens)
        total = event.total if event.total is not None else total
        if event.tokens:
            tokens += event.tokens
            last = time.perf_counter() - started
            first = first or last
    made = tokens if total is None else total
    if made != new_tokens or not tokens:
        raise RuntimeError(f"a stream ended after {made} of {new_tokens} tokens: {other.decode(errors='replace')}")
    return StreamTimes(first, last, made)


def _parsed(line: bytes) -> dict[str, Any]:
    event: dict[str, Any] = orjson.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise RuntimeError(f"the server refused the load: {line.decode().strip()}")
    return event


def run_load(port: int, dialect: Dialect, prompts: list[str], new_tokens: int) -> LoadResult:
    """All prompts at once."""

    async def run() -> list[StreamTimes]:
        return await asyncio.gather(*(stream_once(port, dialect, prompt, new_tokens) for prompt in prompts))

    started = time.perf_counter()
    streams = uvloop.run(run())
    return LoadResult(tuple(streams), time.perf_counter() - started)
