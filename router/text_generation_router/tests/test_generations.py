"""Shards that come and go, as the launcher's line and the shards' sockets tell it."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from text_generation_launcher.link import Event, Link, Message
from text_generation_proto import generate_pb2 as pb
from text_generation_proto import generate_pb2_grpc as pb_grpc
from text_generation_router.errors import ShardsError
from text_generation_router.generations import LaunchedGenerations, StandaloneGenerations


class FakeServicer(pb_grpc.TextGenerationServiceServicer):
    def __init__(self, path: Path, generation: int) -> None:
        self.path, self.generation = path, generation

    async def ServiceDiscovery(self, request: Any, context: Any) -> Any:
        return pb.ServiceDiscoveryResponse(urls=[f"unix://{self.path}"])

    async def Info(self, request: Any, context: Any) -> Any:
        return pb.InfoResponse(generation=self.generation, dtype="torch.float32", world_size=1)

    async def Health(self, request: Any, context: Any) -> Any:
        return pb.HealthResponse(generation=self.generation)


async def start_shard(path: Path, generation: int) -> grpc.aio.Server:
    server = grpc.aio.server()
    pb_grpc.add_TextGenerationServiceServicer_to_server(FakeServicer(path, generation), server)
    server.add_insecure_port(f"unix://{path}")
    await server.start()
    return server


async def stop_shard(server: grpc.aio.Server, path: Path) -> None:
    await server.stop(grace=None)
    path.unlink(missing_ok=True)


def launched(path: Path, use: Callable[[LaunchedGenerations, Link], Awaitable[None]]) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        launcher = await Link.open(theirs)
        generations = LaunchedGenerations(await Link.open(ours), str(path))
        try:
            await asyncio.wait_for(use(generations, launcher), timeout=30)
        finally:
            await generations.close()
            launcher.close()

    asyncio.run(run())


def test_a_ping_is_answered_before_and_after_there_are_shards(tmp_path: Path) -> None:
    async def use(generations: LaunchedGenerations, launcher: Link) -> None:
        for _ in range(2):
            launcher.send(Message(Event.PING))
            assert await launcher.receive() == Message(Event.PONG)
        generations.listening()
        launcher.send(Message(Event.PING))
        assert [await launcher.receive() for _ in range(2)] == [Message(Event.LISTENING), Message(Event.PONG)]

    launched(tmp_path / "s-0", use)


def test_a_generation_is_handed_out_once_and_when_the_launcher_says_so(tmp_path: Path) -> None:
    path = tmp_path / "s-0"

    async def use(generations: LaunchedGenerations, launcher: Link) -> None:
        shard = await start_shard(path, 1)
        waiting = asyncio.create_task(generations.next())
        assert not (await asyncio.wait([waiting], timeout=0.2))[0]
        launcher.send(Message(Event.READY, 1))
        first = await waiting
        assert first.generation == 1 and await first.is_healthy()
        waiting = asyncio.create_task(generations.next())
        assert not (await asyncio.wait([waiting], timeout=0.2))[0]
        await stop_shard(shard, path)
        assert not await first.is_healthy()
        await first.close()
        shard = await start_shard(path, 2)
        launcher.send(Message(Event.READY, 2))
        second = await waiting
        assert second.generation == 2 and await second.is_healthy()
        await second.close()
        await stop_shard(shard, path)

    launched(path, use)


def test_what_the_launcher_calls_lost_is_lost_and_what_we_see_it_hears(tmp_path: Path) -> None:
    path = tmp_path / "s-0"

    async def use(generations: LaunchedGenerations, launcher: Link) -> None:
        shard = await start_shard(path, 3)
        launcher.send(Message(Event.READY, 3))
        group = await generations.next()
        launcher.send(Message(Event.LOST, 2, "an older one"))
        launcher.send(Message(Event.LOST, 3, "shard 0 was ended by signal 9"))
        assert await group.lost == "shard 0 was ended by signal 9"
        generations.listening()
        generations.confirmed(group)
        generations.lost(group, "why")
        heard = [await launcher.receive() for _ in range(3)]
        assert heard == [Message(Event.LISTENING), Message(Event.CONFIRMED, 3), Message(Event.RESTART, 3, "why")]
        await group.close()
        await stop_shard(shard, path)

    launched(path, use)


def test_a_shard_of_another_generation_than_announced_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "s-0"

    async def use(generations: LaunchedGenerations, launcher: Link) -> None:
        shard = await start_shard(path, 5)
        launcher.send(Message(Event.READY, 4))
        waiting = asyncio.create_task(generations.next())
        assert not (await asyncio.wait([waiting], timeout=0.3))[0]
        launcher.send(Message(Event.READY, 5))
        group = await waiting
        assert group.generation == 5
        await group.close()
        await stop_shard(shard, path)

    launched(path, use)


def test_without_a_launcher_a_socket_that_answers_again_is_the_next_generation(tmp_path: Path) -> None:
    path = tmp_path / "s-0"

    async def run() -> None:
        generations = StandaloneGenerations(str(path))
        shard = await start_shard(path, 1)
        group = await generations.next()
        await stop_shard(shard, path)
        await group.close()
        waiting = asyncio.create_task(generations.next())
        shard = await start_shard(path, 1)
        group = await asyncio.wait_for(waiting, timeout=30)
        assert await group.is_healthy()
        await group.close()
        await stop_shard(shard, path)

    asyncio.run(run())


def test_without_a_launcher_shards_that_were_never_there_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("text_generation_router.shards.CONNECT_S", 0.2)

    async def run() -> None:
        with pytest.raises(ShardsError, match="Could not connect"):
            await StandaloneGenerations(str(tmp_path / "nothing")).next()

    asyncio.run(run())


def test_when_the_launcher_has_ended_its_shards_are_lost_and_none_will_come(tmp_path: Path) -> None:
    path = tmp_path / "s-0"

    async def use(generations: LaunchedGenerations, launcher: Link) -> None:
        shard = await start_shard(path, 1)
        launcher.send(Message(Event.READY, 1))
        group = await generations.next()
        launcher.close()
        assert "launcher has ended" in await group.lost
        with pytest.raises(ShardsError, match="no shards any more"):
            await generations.next()
        await group.close()
        await stop_shard(shard, path)

    launched(path, use)
