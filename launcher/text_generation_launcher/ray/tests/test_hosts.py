"""The actor of fronts, in this process and without Ray. The launcher that it runs is pretended."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from text_generation_common.tasks import cancelled
from text_generation_launcher.ray import hosts
from text_generation_launcher.ray.hosts import FrontHost
from text_generation_launcher.ray.values import EnginePhase, EngineState, FrontOrder

PROGRAM = (sys.executable, str(Path(__file__).with_name("front_program.py")))
ORDER = FrontOrder((), 3000, program=PROGRAM)
LIMIT_S = 60.0


def on_host(
    monkeypatch: pytest.MonkeyPatch, folder: Path, scenario: Callable[[FrontHost], Awaitable[None]], order: FrontOrder
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(hosts, "ASK_S", 0.02)
    monkeypatch.setattr(hosts, "LOOK_S", 0.02)
    monkeypatch.setattr(hosts.ray, "util", SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))

    async def run() -> None:
        async with asyncio.timeout(LIMIT_S):
            host = FrontHost("owner", "front-1")
            try:
                await host.start(order.text())
                await scenario(host)
                await host.end()
                await until(host, lambda state: state.phase is EnginePhase.ENDED)
            finally:
                await cancelled(host._asking, host._leaving)

    asyncio.run(run())


async def until(host: FrontHost, condition: Callable[[EngineState], bool]) -> EngineState:
    state = EngineState(EnginePhase.BLOCKED)
    while not condition(state):
        state = EngineState.of(await host.watch(state.text(), 1.0))
    return state


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r", numbered=True)


def restarts_of(state: EngineState) -> int:
    return -1 if state.demand is None else int(state.demand.wait_s)


def engines_of(state: EngineState) -> int:
    return -1 if state.demand is None else state.demand.requests


def test_fronts_serve_once_their_launcher_says_so_and_follow_the_engines(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    async def scenario(host: FrontHost) -> None:
        state = await until(host, lambda state: state.phase is EnginePhase.SERVING)
        assert (state.address, state.node) == ("127.0.0.1:3000", "127.0.0.1")
        await host.tell("10.0.0.3:1,10.0.0.4:2", "")
        await until(host, lambda state: engines_of(state) == 2)
        await host.tell("", "")  # a driver that knows of no engine yet
        await host.tell("10.0.0.4:2", "")
        await until(host, lambda state: engines_of(state) == 1)

    on_host(monkeypatch, runtime, scenario, ORDER)


def test_a_restart_is_done_once_also_when_another_actor_takes_the_fronts_over(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    async def scenario(host: FrontHost) -> None:
        await until(host, lambda state: state.phase is EnginePhase.SERVING)
        await host.tell("", "")
        for _ in range(2):
            await host.tell("", "r1")
        await until(host, lambda state: restarts_of(state) == 1)
        assert host._engine is not None
        host._engine.release()  # as the kernel does when the actor ends
        next_host = FrontHost("owner", "front-1")
        await next_host.start(ORDER.text())
        await next_host.tell("", "r1")
        await next_host.tell("", "r2")
        await until(next_host, lambda state: restarts_of(state) == 2)
        await cancelled(next_host._asking, next_host._leaving)

    on_host(monkeypatch, runtime, scenario, ORDER)


def test_fronts_that_start_after_a_restart_are_not_replaced_by_it(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    async def scenario(host: FrontHost) -> None:
        other = FrontHost("owner", "front-2")
        await other.tell("", "r1")
        await other.start(replace(ORDER, port=3001).text())
        await until(other, lambda state: state.phase is EnginePhase.SERVING)
        await other.tell("", "r1")
        await other.tell("", "r2")
        await until(other, lambda state: restarts_of(state) == 1)
        await other.end()
        await until(other, lambda state: state.phase is EnginePhase.ENDED)
        await cancelled(other._asking, other._leaving)

    on_host(monkeypatch, runtime, scenario, ORDER)


def test_fronts_whose_actor_is_gone_are_taken_over_and_those_of_another_order_leave_the_port(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    async def scenario(host: FrontHost) -> None:
        before = await until(host, lambda state: state.phase is EnginePhase.SERVING)
        assert host._engine is not None
        host._engine.release()  # as the kernel does when the actor ends
        next_host = FrontHost("owner", "front-1")
        await next_host.tell("10.0.0.3:1", "")
        await next_host.start(ORDER.text())
        after = await until(next_host, lambda state: engines_of(state) == 1)
        assert after.pid == before.pid
        assert next_host._engine is not None
        next_host._engine.release()
        other = FrontHost("owner", "front-2")
        monkeypatch.setattr(hosts, "RETRY_S", 0.05)
        changed = FrontOrder(("--api-workers", "2"), 3000, program=PROGRAM)
        told = EngineState.of(await other.start(changed.text()))
        assert told.phase is EnginePhase.BLOCKED and told.why.startswith("port 3000 is used by the launcher with pid")
        while told.phase is EnginePhase.BLOCKED:
            told = EngineState.of(await other.start(changed.text()))
        assert told.pid != before.pid
        await other.end()
        await until(other, lambda state: state.phase is EnginePhase.ENDED)
        await cancelled(*(each for host in (next_host, other) for each in (host._asking, host._leaving)))

    on_host(monkeypatch, runtime, scenario, ORDER)
