"""Tests KeptProcess, which keeps routers alive. The routers here are one line of Python each."""

import asyncio
import os
import sys

import pytest

from text_generation_common.link import LinkEvent, LinkMessage
from text_generation_launcher.commands import Command
from text_generation_launcher.errors import WebserverCannotStart, WebserverFailed
from text_generation_launcher.kept_process import KeptProcess
from text_generation_launcher.process import Child

SAY = "import os, sys; line = int(sys.argv[1]); say = lambda text: os.write(line, text.encode() + b'\\n')\n"
LISTENING = """say('{"event": "listening", "epoch": 0, "reason": ""}')\n"""
CONFIRMED = """say('{"event": "confirmed", "epoch": 3, "reason": ""}')\n"""
READ = "os.set_blocking(line, True); text = os.read(line, 1000).decode()\n"


class Chances:
    """Stands in for Restarts: allows `number` more starts, each after a wait of `wait_s`."""

    def __init__(self, number: int, wait_s: float) -> None:
        self.left = number
        self._wait_s = wait_s

    def came_up(self) -> None: ...

    def succeeded(self) -> None: ...

    def failed(self, stands_by: bool = False) -> float | None:
        self.left -= 1
        return self._wait_s if self.left >= 0 else None


class Keeper:
    """A KeptProcess, and what starts it: the routers run the given programs, one after the other. An exception among
    them is raised in place of a start."""

    def __init__(self, *programs: str | Exception, chances: int = 5, wait_s: float = 0.0) -> None:
        self.received: list[LinkMessage] = []
        self.num_ends = 0
        self.outputs: list[str] = []
        self._programs = list(programs)
        self.webserver = KeptProcess(
            self.start_router, "Webserver", self.received.append, self._on_end, Chances(chances, wait_s)
        )

    async def start_router(self, fd: int) -> Child:
        program = self._programs.pop(0)
        if isinstance(program, Exception):
            raise program
        command = Command("router", (sys.executable, "-S", "-c", SAY + program, str(fd)), dict(os.environ), (fd,))
        child = await Child.start(command)
        child.exited.add_done_callback(lambda _: self.outputs.append(child.last_lines))
        return child

    def _on_end(self) -> None:
        self.num_ends += 1

    @property
    def num_left(self) -> int:
        return len(self._programs)


def test_a_router_that_never_listened_ends_the_server():
    keeper = Keeper(CONFIRMED, LISTENING)
    with pytest.raises(WebserverFailed):
        asyncio.run(keeper.webserver.run())
    assert keeper.num_left == 1


def test_a_router_that_listened_is_started_again_until_restarts_give_up():
    keeper = Keeper(LISTENING, "sys.exit(3)", WebserverCannotStart("cannot run it"), LISTENING, LISTENING, chances=3)
    with pytest.raises(WebserverFailed):
        asyncio.run(keeper.webserver.run())
    assert (keeper.num_left, keeper.num_ends) == (1, 4)


def test_messages_that_a_router_sends_just_before_its_end_are_received():
    keeper = Keeper(LISTENING + CONFIRMED, chances=0)
    with pytest.raises(WebserverFailed):
        asyncio.run(keeper.webserver.run())
    assert keeper.received == [LinkMessage(LinkEvent.CONFIRMED, 3)]


def test_a_later_router_is_notified_of_living_shards_and_not_of_dead_ones():
    async def run(*messages: LinkMessage) -> list[str]:
        program = READ + "print(text)\n" + LISTENING
        keeper = Keeper(LISTENING, program, chances=1)
        for message in messages:
            keeper.webserver.notify(message)
        running = asyncio.create_task(keeper.webserver.run())
        if messages[-1].event is LinkEvent.LOST:
            while keeper.num_left:
                await asyncio.sleep(0.01)
            keeper.webserver.notify(LinkMessage(LinkEvent.READY, 9))
        with pytest.raises(WebserverFailed):
            await asyncio.wait_for(running, 30)
        return keeper.outputs

    assert '"epoch":2' in asyncio.run(run(LinkMessage(LinkEvent.READY, 2)))[1]
    lost = asyncio.run(run(LinkMessage(LinkEvent.READY, 2), LinkMessage(LinkEvent.LOST, 2)))
    assert '"epoch":9' in lost[1]
    assert '"epoch":2' not in lost[1]


def test_a_router_is_notified_once_of_shards_that_become_ready_while_it_is_started():
    async def run() -> list[str]:
        keeper = Keeper("import time\n" + LISTENING + "time.sleep(0.3)\n" + READ + "print(text)\n", chances=0)
        start = keeper.start_router

        async def start_late(fd: int) -> Child:
            await asyncio.sleep(0.1)
            keeper.webserver.notify(LinkMessage(LinkEvent.READY, 7))
            return await start(fd)

        keeper.webserver = KeptProcess(start_late, "Webserver", print, lambda: None, Chances(0, 0.0))
        with pytest.raises(WebserverFailed):
            await asyncio.wait_for(keeper.webserver.run(), 30)
        return keeper.outputs

    assert asyncio.run(run())[0].count('"epoch":7') == 1


def test_after_a_stop_between_two_routers_no_router_is_started():
    async def run() -> Keeper:
        keeper = Keeper(LISTENING, LISTENING)
        running = asyncio.create_task(keeper.webserver.run())
        while not keeper.num_ends:
            await asyncio.sleep(0)
        keeper.webserver.stop()
        await asyncio.wait_for(running, 30)
        return keeper

    assert asyncio.run(run()).num_left == 1


def test_the_next_router_waits_as_long_as_restarts_say_or_until_a_stop():
    async def run() -> Keeper:
        keeper = Keeper(LISTENING, LISTENING, wait_s=1000.0)
        running = asyncio.create_task(keeper.webserver.run())
        while not keeper.num_ends:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert keeper.num_left == 1
        keeper.webserver.stop()
        await asyncio.wait_for(running, 30)
        return keeper

    assert asyncio.run(run()).num_left == 1
