"""The line between launcher and router: a socketpair that the router inherits, with one JSON object in each text line.

Messages from launcher to router: `ready` (the shards of this epoch answer), `lost` (the shards of this epoch are dead
or will now be killed) and `ping`. Messages from router to launcher: `listening` (the router serves requests, and from
now on answers pings), `pong` (the event loop's answer to a ping), `confirmed` (a step of this epoch succeeded; sent
once in each epoch), `blamed` (a request was ended because it killed the shards of this epoch) and `restart` (the router
asks for new shards). The connection closes when either process ends.

An engine in a process of its own has the same line; its `listening` says at which address it serves, and `deserted`
asks for its end, because no front has been connected for a while. The line of a
front has no messages about shards. The launcher sends it `engines` (the replicas, and where their engines are) and
`scaled` (the answer to `scale`: a reason if it is refused), the front sends `scale` (how many replicas are wanted) and
`demand`.

A front, one of several routers on a port, says `draining` when it was asked to end, and waits for the answer: `leave`
(other fronts take new connections) or `ending` (the whole server ends, which may also come later).

The launcher has the list of LoRA adapters. A router that was asked to change it sends `adapter`. The launcher then
writes the list into a file and sends every router `adapters` with the file's path and the list's number, which it
answers with `adapters_taken` once its clients see the list. When all have answered, the first one gets `adapter_set`
with the number that its `adapter` had, and with a reason if something went wrong. The file is there for its length: a
line has at most LINE_LIMIT bytes.
"""

import asyncio
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from text_generation_common.autoscaling import Demand
from text_generation_common.json_values import as_json, from_json


class ReplicaState(StrEnum):
    PENDING = "pending"  # no machine has room for it
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # takes no new requests, and leaves when its requests have ended or moved
    FAILED = "failed"  # waits for its next start


@dataclass(frozen=True, slots=True)
class ReplicaNote:
    """One replica, an engine and its shards, as operators see it."""

    name: str
    state: ReplicaState
    endpoint: str | None = None  # where fronts connect; None: nowhere yet
    reason: str = ""  # why the replica is not ready, as far as there is something to say


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The replicas of a server, and how many there are to be."""

    wanted: int
    replicas: tuple[ReplicaNote, ...] = ()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where fronts connect."""
        return tuple(replica.endpoint for replica in self.replicas if replica.endpoint is not None)

    def count(self, state: ReplicaState) -> int:
        return sum(replica.state is state for replica in self.replicas)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


LINE_LIMIT = 2**16


class LinkEvent(StrEnum):
    READY = "ready"
    LOST = "lost"
    LISTENING = "listening"
    CONFIRMED = "confirmed"
    BLAMED = "blamed"
    RESTART = "restart"
    PING = "ping"
    PONG = "pong"
    ENGINES = "engines"
    SCALE = "scale"
    SCALED = "scaled"
    DEMAND = "demand"
    DESERTED = "deserted"
    DRAINING = "draining"
    LEAVE = "leave"
    ENDING = "ending"
    ADAPTER = "adapter"
    ADAPTERS = "adapters"
    ADAPTERS_TAKEN = "adapters_taken"
    ADAPTER_SET = "adapter_set"


@dataclass(frozen=True, slots=True)
class AdapterNote:
    """A LoRA adapter by the name that clients give."""

    name: str
    folder: str = ""
    digest: str = ""  # "": the name ends


@dataclass(frozen=True, slots=True)
class AdapterNotes:
    adapters: tuple[AdapterNote, ...]


def write_adapters(file: str, notes: Iterable[AdapterNote]) -> None:
    """The file is there as a whole, or as it was. OSError."""
    partial = f"{file}.partial"
    Path(partial).write_bytes(as_json(AdapterNotes(tuple(notes))))
    os.replace(partial, file)


def read_adapters(file: str) -> tuple[AdapterNote, ...]:
    """OSError, and ValueError for another content."""
    return from_json(AdapterNotes, Path(file).read_bytes()).adapters


@dataclass(frozen=True, slots=True)
class LinkMessage:
    event: LinkEvent
    epoch: int = 0  # with `adapter…`: a number that the answer has, too
    reason: str = ""
    address: str = ""  # where an engine listens, with `listening`
    replicas: int = 0  # number of replicas that are wanted, with `scale`
    deployment: ReplicaReport | None = None  # with `engines`
    demand: Demand | None = None  # with `demand`
    adapter: AdapterNote | None = None  # with `adapter`


class Link:
    """One end of the line between launcher and router. It is made by `Link.open`, inside the event loop that uses
    it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: socket.socket) -> None:
        self._reader = reader
        self._writer = writer
        # Messages are sent on a duplicate of the socket: a failed write through the stream would close the stream, and
        # the last messages of the other process would never be read.
        self._sending = end

    @classmethod
    async def open(cls, end: socket.socket) -> "Link":
        """Takes over `end`, a connected stream socket."""
        sending = end.dup()
        return cls(*await asyncio.open_connection(sock=end, limit=LINE_LIMIT), sending)

    def send(self, message: LinkMessage) -> None:
        """Sends a message without blocking. The message is lost if the other process has ended or its receive buffer is
        full.
        """
        with suppress(OSError):
            self._sending.send(as_json(message) + b"\n", socket.MSG_DONTWAIT)

    async def receive(self) -> LinkMessage | None:
        """Waits for the next message. Returns None when the other process has ended. ValueError for a line that is not
        a message."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        if not line.endswith(b"\n"):
            return None
        return from_json(LinkMessage, line)

    def close(self) -> None:
        self._sending.close()
        self._writer.close()
