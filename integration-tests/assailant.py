"""Runs one assault at full rate, in a process of low priority. In a real attack this process would run on other
machines.

`python assailant.py NAME PORT SECONDS KEY` prints the number of answers of each status, as JSON. It uses plain sockets,
so that the attacker uses little of the machine's processor time."""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

from assaults import ASSAULTS, Assault, Manner

CONNECT_S = 5.0
NICENESS = 19
DRIP_S = 0.05  # seconds between two bytes of a connection that sends one byte at a time
AFTER_REFUSAL_S = 0.02  # seconds that a refused client waits, so that it does not become a busy loop
PATIENCE_S = 60.0  # seconds that one answer may take
READ_BYTES = 1 << 16


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=READ_BYTES)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_status(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    return line.split(b" ")[1].decode() if line.startswith(b"HTTP/1.1 ") else "no answer"


async def read_to_end(reader: asyncio.StreamReader) -> None:
    while await reader.read(READ_BYTES):
        pass


async def once(assault: Assault, port: int, request: bytes) -> str:
    """Sends one request on a new connection. Returns the answer's status, or how the connection ended without an
    answer."""
    manner = assault.manner
    async with connection(port) as (reader, writer):
        if manner is Manner.CONNECT:
            return "connected"
        if manner is Manner.DRIP:
            for byte in request:
                writer.write(bytes([byte]))
                await asyncio.sleep(DRIP_S)
        else:
            writer.write(request[:-1] if manner is Manner.HALF else request)
        if manner is Manner.CLOSE_AT_ONCE:
            await asyncio.sleep(0)
            return "sent"
        if manner is Manner.NEVER_READ:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(PATIENCE_S)
            return "unread"
        async with asyncio.timeout(PATIENCE_S):
            # A server may answer and close before the whole request was sent.
            status = await read_status(reader)
            if manner is not Manner.HANG_UP:
                await read_to_end(reader)
        return status


async def attack(assault: Assault, port: int, requests: Iterator[bytes], end_s: float, counts: Counter[str]) -> None:
    while time.monotonic() < end_s:
        try:
            status = await once(assault, port, next(requests))
        except (OSError, TimeoutError) as error:
            status = type(error).__name__
        counts[status] += 1
        await asyncio.sleep(0 if status == "200" else AFTER_REFUSAL_S)


async def run(assault: Assault, port: int, seconds: float, key: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    requests = assault.requests(key)
    end_s = time.monotonic() + seconds
    attackers = [attack(assault, port, requests, end_s, counts) for _ in range(assault.connections)]
    attacking = [asyncio.create_task(attacker) for attacker in attackers]
    _, late = await asyncio.wait(attacking, timeout=seconds)  # `late`: connections still without an answer at the end
    for task in late:
        task.cancel()
    for ended in await asyncio.gather(*attacking, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
    counts["under way"] = len(late)
    return counts


def main() -> None:
    name, port, seconds, key = sys.argv[1:]
    with suppress(OSError):
        os.nice(NICENESS)
    print(json.dumps(asyncio.run(run(ASSAULTS[name], int(port), float(seconds), key))))


if __name__ == "__main__":
    main()
