"""The line between launcher and router: an inherited socketpair, one JSON object a line. Standard library only.

Launcher to router: `ready` (the shards of this generation answer), `lost` (they are gone, or will be at once) and
`ping`. Router to launcher: `listening` (requests are served, and pings are answered), `pong` (the event loop's answer
to a ping), `confirmed` (a step of this generation made tokens or computed chunks; said once for each generation),
`blamed` (a request has ended because this generation died of it) and `restart` (this generation is of no use any more).
The end of the line is the end of the other process.
"""

import asyncio
import json
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum

LINE_LIMIT = 2**16


class Event(StrEnum):
    READY = "ready"
    LOST = "lost"
    LISTENING = "listening"
    CONFIRMED = "confirmed"
    BLAMED = "blamed"
    RESTART = "restart"
    PING = "ping"
    PONG = "pong"


@dataclass(frozen=True, slots=True)
class Message:
    event: Event
    generation: int = 0
    reason: str = ""


class Link:
    """One end of the line. Made by `Link.open` inside the event loop that uses it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: socket.socket) -> None:
        self._reader = reader
        self._writer = writer
        # A failed write through the stream would close it, and what the other process said last would never be read.
        self._sending = end

    @classmethod
    async def open(cls, end: socket.socket) -> "Link":
        """Takes over `end`, a connected stream socket."""
        sending = end.dup()
        return cls(*await asyncio.open_connection(sock=end, limit=LINE_LIMIT), sending)

    def send(self, message: Message) -> None:
        """Never blocks; what the other process does not live to read is lost."""
        with suppress(OSError):
            self._sending.send(json.dumps(asdict(message)).encode() + b"\n", socket.MSG_DONTWAIT)

    async def receive(self) -> Message | None:
        """The next message; None when the other process has ended."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        if not line.endswith(b"\n"):
            return None
        fields = json.loads(line)
        return Message(Event(fields["event"]), int(fields["generation"]), str(fields["reason"]))

    def close(self) -> None:
        self._sending.close()
        self._writer.close()
