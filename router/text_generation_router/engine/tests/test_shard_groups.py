"""Groups of shards that start and end, as the launcher's messages and the shards' sockets show."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from text_generation_common.link import Link, LinkEvent, LinkMessage
from text_generation_proto import generate_pb2 as pb
from text_generation_proto import generate_pb2_grpc as pb_grpc
from text_generation_router.engine.shard_groups import LaunchedGroups, StandaloneGroups
from text_generation_router.errors import ShardsError


class FakeServicer(pb_grpc.TextGenerationServiceServicer):
    step_clients = 0

    def __init__(self, path: Path, epoch: int) -> None:
        self.path, self.epoch = path, epoch

    async def ServiceDiscovery(self, request: Any, context: Any) -> Any:
        return pb.ServiceDiscoveryResponse(urls=[f"unix://{self.path}"])

    async def Info(self, request: Any, context: Any) -> Any:
        return pb.InfoResponse(epoch=self.epoch, dtype="torch.float32", world_size=1)

    async def Health(self, request: Any, context: Any) -> Any:
        return pb.HealthResponse(epoch=self.epoch, step_clients=self.step_clients)


async def start_shard(path: Path, epoch: int) -> grpc.aio.Server:
    server = grpc.aio.server()
    pb_grpc.add_TextGenerationServiceServicer_to_server(FakeServicer(path, epoch), server)
    server.add_insecure_port(f"unix://{path}")
    await server.start()
    return server


async def stop_shard(server: grpc.aio.Server, path: Path) -> None:
    await server.stop(grace=None)
    path.unlink(missing_ok=True)


@asynccontextmanager
async def launched(path: Path) -> AsyncIterator[tuple[LaunchedGroups, Link]]:
    ours, theirs = socket.socketpair()
    launcher = await Link.open(theirs)
    shard_groups = LaunchedGroups(await Link.open(ours), str(path))
    try:
        async with asyncio.timeout(30):
            yield shard_groups, launcher
    finally:
        await shard_groups.close()
        launcher.close()


async def test_a_ping_is_answered_before_and_after_there_are_shards(tmp_path: Path) -> None:
    async with launched(tmp_path / "s-0") as (shard_groups, launcher):
        for _ in range(2):
            launcher.send(LinkMessage(LinkEvent.PING))
            assert await launcher.receive() == LinkMessage(LinkEvent.PONG)
        shard_groups.listening()
        launcher.send(LinkMessage(LinkEvent.PING))
        assert [await launcher.receive() for _ in range(2)] == [
            LinkMessage(LinkEvent.LISTENING),
            LinkMessage(LinkEvent.PONG),
        ]


async def test_the_shards_of_an_epoch_are_handed_out_once_and_when_the_launcher_says_so(tmp_path: Path) -> None:
    path = tmp_path / "s-0"
    async with launched(path) as (shard_groups, launcher):
        shard = await start_shard(path, 1)
        waiting = asyncio.create_task(shard_groups.next())
        assert not (await asyncio.wait([waiting], timeout=0.2))[0]
        launcher.send(LinkMessage(LinkEvent.READY, 1))
        first = await waiting
        assert first.epoch == 1 and await first.is_healthy()
        waiting = asyncio.create_task(shard_groups.next())
        assert not (await asyncio.wait([waiting], timeout=0.2))[0]
        await stop_shard(shard, path)
        assert not await first.is_healthy()
        await first.close()
        shard = await start_shard(path, 2)
        launcher.send(LinkMessage(LinkEvent.READY, 2))
        second = await waiting
        assert second.epoch == 2 and await second.is_healthy()
        await second.close()
        await stop_shard(shard, path)


async def test_launcher_and_router_report_lost_groups_to_each_other(tmp_path: Path) -> None:
    path = tmp_path / "s-0"
    async with launched(path) as (shard_groups, launcher):
        shard = await start_shard(path, 3)
        launcher.send(LinkMessage(LinkEvent.READY, 3))
        group = await shard_groups.next()
        launcher.send(LinkMessage(LinkEvent.LOST, 2, "an older one"))
        launcher.send(LinkMessage(LinkEvent.LOST, 3, "shard 0 was ended by signal 9"))
        assert await group.lost == "shard 0 was ended by signal 9"
        shard_groups.listening()
        shard_groups.confirmed(group)
        shard_groups.lost(group, "why")
        heard = [await launcher.receive() for _ in range(3)]
        assert heard == [
            LinkMessage(LinkEvent.LISTENING),
            LinkMessage(LinkEvent.CONFIRMED, 3),
            LinkMessage(LinkEvent.RESTART, 3, "why"),
        ]
        await group.close()
        await stop_shard(shard, path)


async def test_a_shard_of_another_epoch_than_announced_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "s-0"
    async with launched(path) as (shard_groups, launcher):
        shard = await start_shard(path, 5)
        launcher.send(LinkMessage(LinkEvent.READY, 4))
        waiting = asyncio.create_task(shard_groups.next())
        assert not (await asyncio.wait([waiting], timeout=0.3))[0]
        launcher.send(LinkMessage(LinkEvent.READY, 5))
        group = await waiting
        assert group.epoch == 5
        await group.close()
        await stop_shard(shard, path)


async def test_without_a_launcher_a_socket_that_answers_again_is_the_next_epoch(tmp_path: Path) -> None:
    path = tmp_path / "s-0"
    shard_groups = StandaloneGroups(str(path))
    shard = await start_shard(path, 1)
    group = await shard_groups.next()
    await stop_shard(shard, path)
    await group.close()
    waiting = asyncio.create_task(shard_groups.next())
    shard = await start_shard(path, 1)
    group = await asyncio.wait_for(waiting, timeout=30)
    assert await group.is_healthy()
    await group.close()
    await stop_shard(shard, path)


async def test_without_a_launcher_shards_that_were_never_there_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("text_generation_router.engine.shards.CONNECT_S", 0.2)
    with pytest.raises(ShardsError, match="Could not connect"):
        await StandaloneGroups(str(tmp_path / "nothing")).next()


async def test_a_shard_of_which_another_webserver_does_not_let_go_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reason = tmp_path / "s-0", "another webserver is connected"
    monkeypatch.setattr(FakeServicer, "step_clients", 1)
    monkeypatch.setattr("text_generation_router.engine.shards.SETTLE_S", 0.05)
    async with launched(path) as (shard_groups, launcher):
        shard = await start_shard(path, 1)
        launcher.send(LinkMessage(LinkEvent.READY, 1))
        waiting = asyncio.create_task(shard_groups.next())
        message = await launcher.receive()
        assert message is not None and message.event is LinkEvent.RESTART and message.reason.startswith(reason)
        waiting.cancel()
        with pytest.raises(ShardsError, match=reason):
            await StandaloneGroups(str(path)).next()
        await stop_shard(shard, path)


async def test_when_the_launcher_has_ended_its_shards_are_lost_and_none_will_come(tmp_path: Path) -> None:
    path = tmp_path / "s-0"
    async with launched(path) as (shard_groups, launcher):
        shard = await start_shard(path, 1)
        launcher.send(LinkMessage(LinkEvent.READY, 1))
        group = await shard_groups.next()
        launcher.close()
        assert "launcher has ended" in await group.lost
        with pytest.raises(ShardsError, match="no shards any more"):
            await shard_groups.next()
        await group.close()
        await stop_shard(shard, path)
