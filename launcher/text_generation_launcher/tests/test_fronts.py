"""Fronts kept alive, and replaced without a gap. The fronts here are a few lines of Python each."""

import asyncio
import logging
import os
import signal
import sys

import pytest

from text_generation_launcher import fronts, restarts
from text_generation_launcher.commands import Command
from text_generation_launcher.errors import WebserverFailed
from text_generation_launcher.fronts import Fronts
from text_generation_launcher.process import Child

LIMIT_S = 90.0
# A front that listens. After SIGTERM it says that it is draining, waits for the answer, does what stands for ENDS, and
# ends with status 0.
FRONT = """
import json, os, signal, socket, sys, time
line = socket.socket(fileno=int(sys.argv[1]))
say = lambda event: line.sendall(json.dumps({"event": event, "epoch": 0, "reason": ""}).encode() + bytes([10]))
def drain(number, frame):
    say("draining")
    for text in line.makefile():
        event = json.loads(text)["event"]
        if event != "ping":
            break
    print(event, flush=True)
    ENDS
    os._exit(0)
signal.signal(signal.SIGTERM, drain)
say("listening")
while True:
    time.sleep(60)
"""
ENDS = FRONT.replace("ENDS", "pass")
STAYS = FRONT.replace("ENDS", "time.sleep(60)")
FAILS = FRONT.replace("ENDS", "os._exit(3)")
DIES = FRONT.replace("    time.sleep(60)", "    time.sleep(0.01); os._exit(4)").replace("ENDS", "pass")
NEVER_LISTENS = "import sys; sys.exit(3)"


class Site:
    """Fronts whose processes run the given programs; the last program is that of all later processes."""

    def __init__(self, *programs: str, number: int = 2, patience_s: float = LIMIT_S) -> None:
        self.started: list[tuple[int, Child]] = []  # each with the front's number
        self.max_living = 0
        self._programs = list(programs)
        self.fronts = Fronts(self._start, number, patience_s)

    async def _start(self, number: int, fd: int) -> Child:
        program = self._programs.pop(0) if len(self._programs) > 1 else self._programs[0]
        command = Command("router", (sys.executable, "-S", "-c", program, str(fd)), dict(os.environ), (fd,))
        child = await Child.start(command)
        assert number not in [number for number, _ in self.living], "two living fronts have the same number"
        self.started.append((number, child))
        self.max_living = max(self.max_living, len(self.living))
        return child

    @property
    def living(self) -> list[tuple[int, Child]]:
        return [(number, child) for number, child in self.started if not child.exited.done()]

    @property
    def all_listen(self) -> bool:
        return all(front.process.listening.is_set() for front in self.fronts._fronts)

    async def until_started(self, count: int) -> None:
        await until(lambda: len(self.started) == count and self.all_listen)

    def run(self, use) -> None:
        async def run() -> None:
            running = asyncio.create_task(self.fronts.run())
            try:
                async with asyncio.timeout(LIMIT_S):
                    await use(self, running)
            finally:
                if not running.done():
                    self.fronts.stop()
                    await asyncio.wait_for(running, LIMIT_S)
                for _, child in self.started:
                    child.send(signal.SIGKILL)
                    await child.exited

        asyncio.run(run())


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_a_restart_replaces_each_front_and_never_has_fewer_that_listen():
    async def use(site: Site, running) -> None:
        await site.until_started(3)
        site.fronts.restart()
        await site.until_started(6)
        await until(lambda: len(site.living) == 3)
        assert [child.exited.result() for _, child in site.started[:3]] == [0, 0, 0]
        assert [child.last_lines for _, child in site.started[:3]] == ["leave"] * 3
        assert {number for number, _ in site.started} <= {0, 1, 2, 3, 4, 5}

    Site(ENDS, number=3).run(use)


def test_a_front_that_another_process_ends_is_replaced_at_once_and_not_as_a_failure(caplog):
    async def use(site: Site, running) -> None:
        await site.until_started(2)
        (_, leaving), (_, staying) = site.started
        os.kill(leaving.pid, signal.SIGTERM)
        await site.until_started(3)
        assert len(site.living) == 3, "the one that leaves has requests left"
        leaving.send(signal.SIGKILL)
        await until(lambda: len(site.fronts._fronts) == 2)
        assert not staying.exited.done()

    with caplog.at_level(logging.INFO):
        Site(STAYS, ENDS).run(use)
    assert "Crashed" not in caplog.text and "again in" not in caplog.text


def test_fronts_that_leave_late_are_killed():
    async def use(site: Site, running) -> None:
        await site.until_started(1)
        site.fronts.restart()
        await site.until_started(2)
        await until(lambda: len(site.living) == 1)
        assert site.started[0][1].exited.result() == -signal.SIGKILL

    Site(STAYS, ENDS, number=1, patience_s=0.1).run(use)


def test_a_restart_whose_front_does_not_serve_is_given_up_and_the_old_fronts_go_on(caplog):
    async def use(site: Site, running) -> None:
        await site.until_started(2)
        site.fronts.restart()
        await until(lambda: "given up" in caplog.text)
        await asyncio.wait([running], timeout=0.2)
        assert not running.done() and len(site.living) == 2
        site.fronts.restart()
        await site.until_started(5)
        await until(lambda: len(site.living) == 2)

    Site(ENDS, ENDS, NEVER_LISTENS, ENDS).run(use)


def test_a_front_that_fails_while_it_leaves_does_not_end_the_server():
    async def use(site: Site, running) -> None:
        await site.until_started(1)
        site.fronts.restart()
        await until(lambda: len(site.started) == 2 and len(site.living) == 1)
        assert not running.done()

    Site(FAILS, ENDS, number=1).run(use)


def test_a_stop_tells_fronts_that_leave_and_those_that_serve_that_the_server_ends():
    async def use(site: Site, running) -> None:
        await site.until_started(1)
        site.fronts.stop()
        await running
        assert site.started[0][1].last_lines == "ending"

    Site(ENDS, number=1).run(use)


def test_a_first_front_that_never_serves_ends_the_server():
    async def use(site: Site, running) -> None:
        with pytest.raises(WebserverFailed):
            await running

    Site(NEVER_LISTENS).run(use)


def test_a_front_that_dies_again_and_again_is_tried_again_later_while_another_serves(caplog, monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(fronts, "RETRY_S", 0.2)

    async def use(site: Site, running) -> None:
        await site.until_started(2)
        (_, staying), (_, dying) = site.started
        dying.send(signal.SIGKILL)
        await until(lambda: "is started again in" in caplog.text)
        assert not running.done() and not staying.exited.done()
        given_up = len(site.started)
        await until(lambda: len(site.started) > given_up)
        site._programs[:] = [ENDS]
        await until(lambda: len(site.living) == 2 and site.all_listen and len(site.fronts._fronts) == 2)
        assert not staying.exited.done()

    Site(ENDS, ENDS, DIES).run(use)


def test_a_front_that_dies_again_and_again_ends_the_server_if_no_other_serves(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.01)

    async def use(site: Site, running) -> None:
        await site.until_started(1)
        site.started[0][1].send(signal.SIGKILL)
        with pytest.raises(WebserverFailed):
            await running

    Site(ENDS, DIES, number=1).run(use)
