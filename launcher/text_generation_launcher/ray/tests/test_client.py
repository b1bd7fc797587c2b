"""The launcher's side of Ray, with a driver that the test plays at the other end of the line."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable

import pytest

from text_generation_common.autoscaling import Demand
from text_generation_common.json_values import as_json, from_json
from text_generation_common.tasks import cancelled
from text_generation_launcher.errors import RayFailed
from text_generation_launcher.ray.client import RayClient
from text_generation_launcher.ray.values import (
    EngineOrder,
    FrontOrder,
    RayPhase,
    RayReport,
    RayStatus,
    Wanted,
    digest_of,
)

LIMIT_S = 60.0
ORDER = EngineOrder(("--model-id", "m"))


class PlayedDriver:
    """Stands for the driver's process, and for the child that the launcher keeps of it."""

    def __init__(self, fd: int, last_lines: str = "") -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.how_it_ended = "exited with status 3"
        self.last_lines = last_lines
        self._line = socket.socket(fileno=os.dup(fd))
        self._line.setblocking(False)
        self._rest = b""

    async def wish(self) -> Wanted:
        """The newest `Wanted` message that has come."""
        while b"\n" not in self._rest:
            self._rest += await asyncio.get_running_loop().sock_recv(self._line, 2**20)
        *lines, self._rest = self._rest.split(b"\n")
        return from_json(Wanted, lines[-1])

    def report(self, number: int, *replicas: RayStatus, fronts: tuple[RayStatus, ...] = ()) -> None:
        self._line.send(as_json(RayReport(replicas, number, fronts)) + b"\n")

    def send(self, number: signal.Signals) -> None:
        self.end()

    def end(self) -> None:
        self._line.close()
        self.exited.set_result(3)


class Bench:
    """A client that runs, and the drivers that it has started."""

    def __init__(self, *last_lines: str) -> None:
        self.client = RayClient(self._start, ORDER)
        self.drivers: asyncio.Queue[PlayedDriver] = asyncio.Queue()
        self.running = asyncio.create_task(self.client.run())
        self._last_lines = "\n".join(last_lines)

    async def _start(self, fd: int) -> PlayedDriver:
        driver = PlayedDriver(fd, self._last_lines)
        self.drivers.put_nowait(driver)
        return driver


def on_bench(scenario: Callable[[Bench], Awaitable[None]], *last_lines: str) -> None:
    async def run() -> None:
        bench = Bench(*last_lines)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(LIMIT_S):
                await scenario(bench)
        finally:
            await cancelled(bench.running)

    asyncio.run(run())


def test_what_is_cleared_is_gone_only_once_a_driver_that_knows_of_it_says_so() -> None:
    async def scenario(bench: Bench) -> None:
        bench.client.want(0, lambda status: None)
        driver = await bench.drivers.get()
        first = await driver.wish()
        assert list(first.replicas) == [f"{digest_of(ORDER)}-0"]
        clearing = asyncio.create_task(bench.client.clear())
        second = await driver.wish()
        assert not second.replicas
        driver.report(first.number)  # the driver has not read the second `Wanted` yet
        driver.report(second.number, RayStatus(f"{digest_of(ORDER)}-0", RayPhase.DRAINING))
        driver.report(first.number)
        await asyncio.sleep(0.05)
        assert not clearing.done()
        driver.report(second.number)
        await clearing
        driver.end()

    on_bench(scenario)


def test_a_driver_that_dies_meanwhile_is_followed_by_one_that_clears() -> None:
    async def scenario(bench: Bench) -> None:
        bench.client.want(0, lambda status: None)
        driver = await bench.drivers.get()
        driver.report((await driver.wish()).number)
        clearing = asyncio.create_task(bench.client.clear())
        await driver.wish()
        driver.end()
        other = await bench.drivers.get()
        wish = await other.wish()
        assert not wish.replicas
        other.report(wish.number)
        await clearing
        other.end()

    on_bench(scenario)


def test_fronts_elsewhere_tell_what_their_clients_want_and_are_gone_once_none_is_reported() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.client.fronts_gone(LIMIT_S)  # no fronts were ever wanted
        bench.client.want_fronts(FrontOrder((), 3000))
        driver = await bench.drivers.get()
        wish = await driver.wish()
        assert wish.fronts == FrontOrder((), 3000)
        fronts = RayStatus("front-1", RayPhase.SERVING, "h:3000", demand=Demand(1.0, 5, 0.5))
        driver.report(wish.number, fronts=(fronts,))
        while not bench.client.demands:
            await asyncio.sleep(0.001)
        assert bench.client.demands == [fronts.demand]
        bench.client.drop_fronts()
        leaving = asyncio.create_task(bench.client.fronts_gone(LIMIT_S))
        wish = await driver.wish()
        assert wish.fronts is None
        driver.report(wish.number - 1)
        driver.report(wish.number, fronts=(fronts,))
        await asyncio.sleep(0.05)
        assert not leaving.done()
        driver.report(wish.number)
        await leaving
        assert bench.client.demands == []
        driver.end()

    on_bench(scenario)


def test_the_first_driver_s_last_line_is_the_error_when_ray_cannot_be_reached() -> None:
    async def scenario(bench: Bench) -> None:
        (await bench.drivers.get()).end()
        with pytest.raises(RayFailed, match="no such host"):
            await bench.running

    on_bench(scenario, "Ray cannot be reached: no such host")


def test_a_restart_of_fronts_is_told_to_the_next_driver_too() -> None:
    async def scenario(bench: Bench) -> None:
        bench.client.restart_fronts()  # no other machine has fronts
        bench.client.want_fronts(FrontOrder((), 3000))
        driver = await bench.drivers.get()
        assert not (await driver.wish()).front_restart
        bench.client.restart_fronts()
        wish = await driver.wish()
        assert wish.front_restart
        driver.report(wish.number)
        driver.end()
        driver = await bench.drivers.get()
        assert (await driver.wish()).front_restart == wish.front_restart
        driver.end()

    on_bench(scenario)


def test_the_log_tells_that_a_lost_engine_s_successor_loads_the_model_again(caplog: pytest.LogCaptureFixture) -> None:
    name = f"{digest_of(ORDER)}-0"

    async def scenario(bench: Bench) -> None:
        bench.client.want(0, lambda status: None)
        driver = await bench.drivers.get()
        number = (await driver.wish()).number
        driver.report(number, RayStatus(name, RayPhase.SERVING, "h:1", "h"))
        driver.report(number, RayStatus(name, RayPhase.STARTING, "h:1", why="its actor was killed"))
        while not caplog.messages[1:]:
            await asyncio.sleep(0.001)
        driver.end()

    with caplog.at_level("INFO"):
        on_bench(scenario)
    assert caplog.messages[:2] == [
        f"{name} serves on h:1",
        f"{name} is lost: its actor was killed. The next start loads the model again",
    ]
