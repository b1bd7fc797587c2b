"""Links between a front and its engines that are slow, silent or cut, and that come back."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from text_generation_common.cluster import security
from text_generation_common.cluster.endpoints import TcpEndpoint
from text_generation_common.cluster.identity import Role
from text_generation_common.cluster.security import Security
from text_generation_router.engine.tests.fakes import Listener, World, expected_tokens, prompt
from text_generation_router.engine_service.identity import EngineIdentity
from text_generation_router.engine_service.server import EngineServer
from text_generation_router.fleet import connection
from text_generation_router.fleet.engine import RemoteEngine
from text_generation_router.fleet.tests.relay import Relay
from text_generation_router.fleet.values import EngineLoss
from text_generation_router.scheduling.request import GenerationRequest

LOGGER = logging.getLogger("test")


class Linked:
    """A front and two engines, each behind a relay. A stream pauses after 40 of its tokens."""

    def __init__(self) -> None:
        self.worlds = [World(), World()]
        self.relays: list[Relay] = []
        self.servers: list[EngineServer] = []
        self.asked: list[Listener] = []

    async def open(self, stack: AsyncExitStack) -> None:
        for number, world in enumerate(self.worlds):
            await world.engine.start()
            stack.push_async_callback(world.engine.close)
            insecure = Security(Role.ENGINE, None, insecure=True, logger=LOGGER)
            server = EngineServer(world.engine, EngineIdentity(f"e{number}", 1, b"d"), world.metrics, 16, insecure)
            port = await server.listen(TcpEndpoint("127.0.0.1", 0))
            stack.push_async_callback(server.close)
            self.servers.append(server)
            self.relays.append(await stack.enter_async_context(Relay(TcpEndpoint("127.0.0.1", port))))
        insecure = Security(Role.FRONT, None, insecure=True, logger=LOGGER)
        self.front = RemoteEngine([relay.endpoint for relay in self.relays], insecure)
        stack.push_async_callback(self.front.close)
        await self.front.start()
        await self.until_connected()

    async def until_connected(self) -> None:
        while len(self.front._fleet.engines) < 2:
            await asyncio.sleep(0.005)

    async def ask_all(self) -> None:
        for number in range(6):
            listener = Listener()
            request = GenerationRequest(tuple(prompt(number)), 80)
            [listener.index] = self.front.submit_all([request], [listener], 40).indexes
            self.asked.append(listener)
        for listener in self.asked:
            await listener.until_tokens(40)
        assert all(world.forward_steps for world in self.worlds)

    async def finish(self) -> None:
        """Every stream ends, with each token given once."""
        for number, listener in enumerate(self.asked):
            self.front.credit(listener.index, 100)
            assert await listener.all_ids() == expected_tokens(prompt(number), 80)

    @property
    def suspects(self) -> list[int]:
        return [listener.index for listener in self.asked if listener.index in self.front._fleet.suspects]

    async def until_idle(self) -> None:
        while not all(world.engine.is_idle for world in self.worlds):
            await asyncio.sleep(0.005)


@asynccontextmanager
async def linked() -> AsyncIterator[Linked]:
    async with asyncio.timeout(120), AsyncExitStack() as stack:
        links = Linked()
        await links.open(stack)
        yield links
        await links.until_idle()
        assert links.front.counts.broken_rules == 0


async def test_a_slow_link_changes_no_text_and_loses_no_engine() -> None:
    async with linked() as links:
        links.relays[0].delay_s = 0.05
        await links.ask_all()
        await links.finish()
        assert links.front.counts.lost_engines == 0


async def test_streams_of_a_silent_engine_go_on_elsewhere_without_suspicion_and_what_it_says_later_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "SILENT_S", 1.0)
    monkeypatch.setattr(security, "PING_AFTER_MS", 600_000)  # so that the frozen engine does not notice the lost link
    async with linked() as links:
        await links.ask_all()
        for listener in links.asked:  # the silent engine makes tokens too
            links.front.credit(listener.index, 20)
        links.relays[0].freeze()
        while not links.front.counts.lost_engines:
            await asyncio.sleep(0.005)
        assert not links.suspects
        await links.finish()
        assert links.worlds[0].engine._requests.num_open, "the engine does not know yet that the front is gone"
        links.relays[0].thaw()
        await links.until_idle()
        await links.until_connected()


async def test_an_unanswered_ping_is_silence_also_if_the_front_read_the_last_message_just_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "QUIET_S", 60.0)  # as if each message had been read the moment before
    monkeypatch.setattr(connection, "SILENT_S", 60.0)
    monkeypatch.setattr(security, "PING_AFTER_MS", 1000)
    monkeypatch.setattr(security, "PING_ANSWER_MS", 1000)
    async with linked() as links:
        await links.ask_all()
        links.relays[0].freeze()
        while not links.front.counts.lost_engines:
            await asyncio.sleep(0.005)
        assert not links.suspects
        links.relays[0].thaw()
        await links.finish()


async def test_a_link_that_is_cut_for_a_moment_gives_nothing_twice_and_leaves_no_suspects() -> None:
    async with linked() as links:
        await links.ask_all()
        for _ in range(3):
            links.relays[0].cut()
            while not links.front.counts.lost_engines:
                await asyncio.sleep(0.005)
            links.front.counts.lost_engines = 0
            await links.until_connected()
            assert not links.suspects, "the engine lives"
        await links.finish()


async def test_no_stream_ends_while_all_links_are_cut_or_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENT_S", 1.0)
    async with linked() as links:
        await links.ask_all()
        links.relays[0].freeze()
        links.relays[1].cut()
        links.relays[1].freeze()
        while links.front._fleet.engines:
            await asyncio.sleep(0.005)
        assert all(listener.end is None for listener in links.asked)
        for relay in links.relays:
            relay.thaw()
        await links.finish()


async def test_an_engine_frees_the_rows_of_a_front_whose_link_is_frozen_and_serves_the_others() -> None:
    """gRPC's pings notice a frozen link on both sides, although no connection ends."""
    async with linked() as links:
        await links.ask_all()
        for relay in links.relays:
            relay.freeze()
        direct = TcpEndpoint("127.0.0.1", links.relays[0]._target.port)
        other = RemoteEngine([direct], Security(Role.FRONT, None, insecure=True, logger=LOGGER))
        await other.start()
        listener = Listener()
        other.submit_all([GenerationRequest(tuple(prompt(9)), 60)], [listener], 100)
        assert await listener.all_ids() == expected_tokens(prompt(9), 60)
        await links.until_idle()
        await other.close()
        for relay in links.relays:
            relay.thaw()
        await links.finish()


async def test_a_silence_is_the_engines_own_if_another_engine_sends_messages() -> None:
    async with linked() as links:
        connection = next(iter(links.front._connections.values()))[0]
        now = asyncio.get_running_loop().time()
        own, other = (links.front._fleet.engines[number] for number in (connection.number, 1 - connection.number))
        own.heard_s, other.heard_s = now - 9, now + 60
        assert connection._silence() is EngineLoss.SILENT
        own.heard_s = other.heard_s = now - 9
        assert connection._silence() is EngineLoss.OUTSIDE
        own.heard_s = other.heard_s = now
