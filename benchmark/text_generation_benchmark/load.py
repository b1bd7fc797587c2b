"""A load generator that costs little: raw HTTP/1.1 over asyncio, one connection per stream."""

import asyncio
import json
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Seconds; token i arrived at `arrivals[i]` after the request was sent."""

    arrivals: tuple[float, ...]

    @property
    def first(self) -> float:
        return self.arrivals[0]

    @property
    def per_token(self) -> float:
        """Between the first token and the last."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, len(self.arrivals) - 1)


@dataclass(frozen=True, slots=True)
class LoadResult:
    streams: tuple[StreamTimes, ...]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(stream.arrivals) for stream in self.streams) / self.wall_s

    @property
    def per_token_s(self) -> float:
        """Median over streams."""
        return sorted(stream.per_token for stream in self.streams)[len(self.streams) // 2]

    @property
    def first_token_s(self) -> float:
        return sorted(stream.first for stream in self.streams)[len(self.streams) // 2]


async def stream_once(port: int, prompt: str, input_tokens: int, new_tokens: int) -> StreamTimes:
    """One /generate_stream of exactly `new_tokens` tokens on the last `input_tokens` of the prompt."""
    parameters = {"truncate": input_tokens, "max_new_tokens": new_tokens, "ignore_eos_token": True}
    body = json.dumps({"inputs": prompt, "parameters": parameters}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /generate_stream HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    started = time.perf_counter()
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    arrivals: list[float] = []
    async for line in reader:
        if line.startswith(b"data: "):
            if line.startswith(b'data: {"error"'):
                raise RuntimeError(f"the server refused the load: {line.decode().strip()}")
            arrivals.append(time.perf_counter() - started)
    writer.close()
    if len(arrivals) != new_tokens:
        raise RuntimeError(f"a stream ended after {len(arrivals)} of {new_tokens} tokens")
    return StreamTimes(tuple(arrivals))


def run_load(port: int, prompts: list[str], input_tokens: int, new_tokens: int) -> LoadResult:
    """All prompts at once."""

    async def run() -> list[StreamTimes]:
        return await asyncio.gather(*(stream_once(port, prompt, input_tokens, new_tokens) for prompt in prompts))

    started = time.perf_counter()
    streams = asyncio.run(run())
    return LoadResult(tuple(streams), time.perf_counter() - started)
