"""The actor of fronts, in this process and without Ray. A fake launcher stands for the real one."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from text_generation_common.json_values import as_json, from_json
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
            host = FrontHost()
            try:
                await host.start(as_json(order))
                await scenario(host)
                await host.end()
                await until(host, lambda state: state.phase is EnginePhase.ENDED)
            finally:
                await cancelled(host._asking, host._leaving)

    asyncio.run(run())


async def until(host: FrontHost, condition: Callable[[EngineState], bool]) -> EngineState:
    state = EngineState(EnginePhase.STARTING)
    while not condition(state):
        state = from_json(EngineState, await host.watch(as_json(state), 1.0))
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
        await host.report_engines("10.0.0.3:1,10.0.0.4:2", "")
        await until(host, lambda state: engines_of(state) == 2)
        await host.report_engines("", "")  # a driver that knows of no engine yet
        await host.report_engines("10.0.0.4:2", "")
        await until(host, lambda state: engines_of(state) == 1)

    on_host(monkeypatch, runtime, scenario, ORDER)


def test_a_restart_is_done_once(monkeypatch: pytest.MonkeyPatch, runtime: Path) -> None:
    async def scenario(host: FrontHost) -> None:
        await until(host, lambda state: state.phase is EnginePhase.SERVING)
        await host.report_engines("", "")
        for _ in range(2):
            await host.report_engines("", "r1")
        await until(host, lambda state: restarts_of(state) == 1)
        await host.report_engines("", "r1")
        await host.report_engines("", "r2")
        await until(host, lambda state: restarts_of(state) == 2)

    on_host(monkeypatch, runtime, scenario, ORDER)


def test_fronts_that_start_after_a_restart_are_not_replaced_by_it(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    async def scenario(host: FrontHost) -> None:
        await until(host, lambda state: state.phase is EnginePhase.SERVING)
        for restart in ("r1", "r1", "r2"):
            await host.report_engines("", restart)
        await until(host, lambda state: restarts_of(state) == 1)

    on_host(monkeypatch, runtime, scenario, ORDER)


def test_engines_that_are_told_before_the_start_are_known_after_it(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    async def scenario(host: FrontHost) -> None:
        other = FrontHost()
        try:
            await other.report_engines("10.0.0.3:1", "")
            await other.start(as_json(ORDER))
            await until(other, lambda state: engines_of(state) == 1)
            await other.end()
            await until(other, lambda state: state.phase is EnginePhase.ENDED)
        finally:
            await cancelled(other._asking, other._leaving)

    on_host(monkeypatch, runtime, scenario, ORDER)


def test_what_cannot_be_started_has_ended_and_says_why(monkeypatch: pytest.MonkeyPatch, runtime: Path) -> None:
    async def scenario(host: FrontHost) -> None:
        state = from_json(EngineState, await host.start(as_json(ORDER)))
        assert state.phase is EnginePhase.ENDED
        assert state.why.startswith("nothing can be started: ") and "no-such-program" in state.why

    on_host(monkeypatch, runtime, scenario, FrontOrder((), 3000, program=("/no-such-program",)))
