"""Reads many streams of events at once, and measures the processor time of the process that writes them."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from text_generation_benchmark.load import Dialect

WARM_EVENTS = 50  # events of each stream before a measurement begins
MAX_TOKENS = 30_000  # tokens of a stream: more than a measurement reads
BEGIN_S = 60.0  # seconds within which all streams must have begun
RECORDED_BYTES = 2**15  # bytes of a stream that are kept
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessTime:
    """Seconds of processor time."""

    user_s: float
    system_s: float

    @property
    def total_s(self) -> float:
        return self.user_s + self.system_s

    def __sub__(self, other: "ProcessTime") -> "ProcessTime":
        return ProcessTime(self.user_s - other.user_s, self.system_s - other.system_s)

    @classmethod
    def of(cls, pid: int) -> "ProcessTime":
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return cls(int(fields[11]) * TICK_S, int(fields[12]) * TICK_S)


@dataclass(frozen=True, slots=True)
class WriterTime:
    """What a process that writes events used in `wall_s` seconds."""

    time: ProcessTime
    tokens: int
    wall_s: float

    @property
    def user_us(self) -> float:
        return self.time.user_s / self.tokens * 1e6

    @property
    def total_us(self) -> float:
        return self.time.total_s / self.tokens * 1e6


class Reader(asyncio.Protocol):
    """Reads a stream of events and counts them."""

    def __init__(self, request: bytes, warm: asyncio.Semaphore) -> None:
        self.events = 0
        self.received = b""  # the first bytes
        self.ended = False
        self._request = request
        self._warm = warm

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        before = self.events
        self.events += data.count(b"data:")
        if len(self.received) < RECORDED_BYTES:
            self.received += data
        if before < WARM_EVENTS <= self.events:
            self._warm.release()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True


async def measure_writers(
    pids: Sequence[int], ports: Sequence[int], request: bytes, streams: int, seconds: float
) -> tuple[list[WriterTime], bytes]:
    """Reads `streams` streams, which several processes write together; the ports get equal parts of the streams.
    Returns what each process used in `seconds` seconds, once all streams have begun, with the tokens of all streams;
    and the first bytes of a stream."""
    async with reading_streams(ports, request, streams) as readers:
        before = [ProcessTime.of(pid) for pid in pids]
        events, started = sum(reader.events for reader in readers), time.perf_counter()
        await asyncio.sleep(seconds)
        used = [ProcessTime.of(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
        tokens, wall_s = sum(reader.events for reader in readers) - events, time.perf_counter() - started
    return [WriterTime(each, tokens, wall_s) for each in used], readers[0].received


@asynccontextmanager
async def reading_streams(ports: Sequence[int], request: bytes, streams: int) -> AsyncIterator[list[Reader]]:
    """Inside this context streams are read, each of which has begun: stream i comes from port i modulo their number.
    RuntimeError if a stream ends before the context does."""
    warm = asyncio.Semaphore(0)
    readers: list[Reader] = []
    for i in range(streams):
        readers.append(await _connected(ports[i % len(ports)], lambda: Reader(request, warm)))
    try:
        async with asyncio.timeout(BEGIN_S):
            for _ in range(streams):
                await warm.acquire()
    except TimeoutError:
        slowest = min(readers, key=lambda reader: reader.events)
        raise RuntimeError(f"a stream had {slowest.events} events: {slowest.received[-300:]!r}") from None
    try:
        yield readers
        ended = [reader for reader in readers if reader.ended]
        if ended:
            raise RuntimeError(f"a stream ended too early: {ended[0].received[-300:]!r}")
    finally:
        for reader in readers:
            reader.transport.abort()


async def _connected(port: int, make: Callable[[], Reader]) -> Reader:
    until_s = time.monotonic() + BEGIN_S
    while True:
        try:
            _, reader = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port)
            return reader
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(0.05)


def request_bytes(dialect: Dialect) -> bytes:
    body = orjson.dumps(dialect.body("The quick brown fox", MAX_TOKENS))
    head = f"POST {dialect.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def events_of(received: bytes) -> list[str]:
    """The chunks of a chunked answer, one event each, as they went over the wire. The last one may be incomplete."""
    _, _, body = received.partition(b"\r\n\r\n")
    return [f"{chunk.decode()}\n\n\r\n" for chunk in body.split(b"\n\n\r\n")[:-1]]
