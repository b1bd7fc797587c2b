"""Processor time of one Load and of one Cache message, on the engine's side and on the front's, gRPC included.

Run as `python -m text_generation_benchmark.micro.news SOCKET HASHES PACE_S`, it is the engine's side: it sends
a message every PACE_S seconds, Cache messages with HASHES hashes or, with 0, Loads.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop

from text_generation_benchmark.live.reading import ProcessTime
from text_generation_benchmark.process import ChildServer, ServerCommand, wait_for
from text_generation_proto import engine_pb2 as pb
from text_generation_proto import engine_pb2_grpc
from text_generation_router.engine.protocol import Load
from text_generation_router.engine_service.news import load_to_pb
from text_generation_router.fleet import reading
from text_generation_router.fleet.cache_index import CacheIndex
from text_generation_router.fleet.choice import EngineChoice
from text_generation_router.wire.version import UINT64, packed

TENANTS = 20  # tenants whose service a Load reports
WARM, PACE_S = 100, 0.001


@dataclass(frozen=True, slots=True)
class NewsCost:
    """Seconds of processor time for one message."""

    front_s: float
    engine_s: float
    bytes: int


def news(hashes: int = 40, messages: int = 2000) -> dict[str, Sequence[float]]:
    """Means, of one measurement each."""
    costs = {"a Load": measure_news(0, messages), f"a Cache message of {hashes} hashes": measure_news(hashes, messages)}
    sides = {"at a front": "front_s", "at an engine": "engine_s"}
    return {f"{what}, {side}": [getattr(cost, name)] for what, cost in costs.items() for side, name in sides.items()}


def measure_news(hashes: int, messages: int) -> NewsCost:
    """The mean of `messages` messages. `hashes`: those of a Cache message; 0: a Load."""
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as name:
        socket = Path(name) / "news"
        arguments = [sys.executable, "-m", __spec__.name, str(socket), str(hashes), str(PACE_S)]
        child = ChildServer(ServerCommand("the sender", arguments, 0, "", 60), Path(name) / "log")
        with child.started():
            wait_for(socket, 60)
            return uvloop.run(_read(f"unix://{socket}", child.pid, messages))


async def _read(address: str, sender: int, messages: int) -> NewsCost:
    index, choice, size = CacheIndex(1), EngineChoice(1), 0
    index.join(0, 10**6)
    own = sent = ProcessTime.of(os.getpid())
    async with grpc.aio.insecure_channel(address) as channel:
        number = 0
        async for message in engine_pb2_grpc.EngineServiceStub(channel).News(pb.NewsRequest(wants_cache=True)):
            number += 1
            if number == WARM:
                own, sent, size = ProcessTime.of(os.getpid()), ProcessTime.of(sender), 0
            size += message.ByteSize()
            if message.HasField("load"):
                choice.take_report(0, reading.load_report_of(message.load).load, number)
            else:
                index.take(0, message.cache.sequence, reading.cache_news_of(message.cache))
            if number == WARM + messages:
                break
    front, engine = ProcessTime.of(os.getpid()) - own, ProcessTime.of(sender) - sent
    return NewsCost(front.total_s / messages, engine.total_s / messages, size // messages)


class NewsSender(engine_pb2_grpc.EngineServiceServicer):
    def __init__(self, hashes: int, pace_s: float) -> None:
        self._hashes, self._pace_s = hashes, pace_s

    async def News(self, request: pb.NewsRequest, context: Any) -> AsyncIterator[pb.NewsMessage]:
        due_s, number, random = time.perf_counter(), 0, np.random.default_rng(0)
        blocks = random.integers(0, 2**63, size=(64, max(1, self._hashes)), dtype=np.uint64)
        while True:
            number += 1
            if self._hashes:
                # Each block is added once and removed again.
                ids = packed(blocks[number // 2 % 64].tolist(), UINT64)
                is_new = number % 2 == 0
                yield pb.NewsMessage(
                    cache=pb.Cache(sequence=number, added=ids if is_new else b"", removed=b"" if is_new else ids)
                )
            else:
                load = load_to_pb(Load(retry_after_s=0))
                load.served.extend(pb.Served(owner=f"owner {i}", tenant="", tokens=i) for i in range(TENANTS))
                yield pb.NewsMessage(load=load)
            due_s += self._pace_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))


async def _send(socket: str, hashes: int, pace_s: float) -> None:
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineServiceServicer_to_server(NewsSender(hashes, pace_s), server)
    server.add_insecure_port(f"unix://{socket}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_send(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
