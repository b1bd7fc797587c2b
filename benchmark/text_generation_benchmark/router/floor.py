"""What writing costs at least: a uvloop program that writes an event to every connection, again and again.

Run as `python -m text_generation_benchmark.router.floor PORT STREAMS PACE_S FILE`; an item of FILE, a JSON list of
strings, is one event as it goes to the socket. Nothing is written before STREAMS connections are there; then there is
one step every PACE_S seconds.
"""

import asyncio
import itertools
import sys
from pathlib import Path

import orjson
import uvloop

# Bytes in a connection's buffer beyond which a step leaves it out: its client is slower than the steps.
MOST_UNREAD = 2**16


async def write_steps(port: int, num_streams: int, pace_s: float, events: list[bytes]) -> None:
    transports: list[asyncio.Transport] = []
    complete = asyncio.Event()

    class StreamWriter(asyncio.Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            transports.append(transport)
            if len(transports) == num_streams:
                complete.set()

    loop = asyncio.get_running_loop()
    await loop.create_server(StreamWriter, "127.0.0.1", port)
    await complete.wait()
    next_event = itertools.cycle(events)
    due_s = loop.time()
    while True:
        for transport in transports:
            if transport.get_write_buffer_size() < MOST_UNREAD:
                transport.write(next(next_event))
        due_s = max(due_s + pace_s, loop.time())
        await asyncio.sleep(due_s - loop.time())


if __name__ == "__main__":
    port, num_streams, pace_s, file = sys.argv[1:]
    events = [event.encode() for event in orjson.loads(Path(file).read_bytes())]
    uvloop.run(write_steps(int(port), int(num_streams), float(pace_s), events))
