"""Replicas on a real Ray cluster of one node, with token and TLS, through everything that can end but the node."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from ray_nodes import local_ray

from text_generation_launcher.commands import Command
from text_generation_launcher.process import Child
from text_generation_launcher.ray.client import RayClient
from text_generation_launcher.ray.replica import RayReplica
from text_generation_launcher.ray.values import EngineOrder

ENGINE = Path(__file__).parents[1] / "launcher/text_generation_launcher/ray/tests/engine_program.py"
ACTOR = "ray::ReplicaHost"  # the title that Ray gives the process
HANG_S = 120.0


class RayUnderTest:
    """Two replicas of a pretended engine, and the client that has asked for them."""

    def __init__(self, address: str, environment: dict[str, str]) -> None:
        self._address = address
        self._environment = os.environ | environment
        self.drivers: list[Child] = []
        order = EngineOrder((), cores=0.1, drain_s=60.0, program=(sys.executable, str(ENGINE)))
        self.client = RayClient(self._start, order)
        self.replicas = [RayReplica(number, self.client, lambda: None) for number in range(2)]

    async def _start(self, fd: int) -> Child:
        argv = (sys.executable, "-m", "text_generation_launcher.ray.driver", str(fd), self._address, "test", "")
        self.drivers.append(await Child.start(Command("ray", argv, self._environment, (fd,))))
        return self.drivers[-1]

    @property
    def endpoints(self) -> list[str | None]:
        return [replica.endpoint for replica in self.replicas]

    async def all_serve(self) -> None:
        await until(lambda: all(replica.is_ready for replica in self.replicas))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.05)


def engines(runtime: Path) -> list[int]:
    """Pids of the engines that live, in the order of their numbers."""
    found = psutil.process_iter(["pid", "cmdline"])
    return sorted(
        process.info["pid"]
        for process in found
        if str(ENGINE) in (process.info["cmdline"] or ()) and str(runtime) in str(process.info["cmdline"])
    )


def actors(runtime: Path) -> list[int]:
    """Pids of the actors: children of the raylet whose folder is beside `runtime`."""
    every = psutil.process_iter(["cmdline"])
    found = [process for process in every if "".join(process.info["cmdline"] or ()).startswith(ACTOR)]
    return [process.pid for process in found if str(runtime.parent) in str((process.parent() or process).cmdline())]


async def life(ray: RayUnderTest, runtime: Path) -> None:
    running = asyncio.create_task(ray.client.run())
    replicas = [asyncio.create_task(replica.run()) for replica in ray.replicas]
    await ray.all_serve()
    served, pids = ray.endpoints, engines(runtime)
    assert len(set(served)) == len(pids) == 2

    # Actors are killed: their engines end with them, and others take their places.
    for pid in actors(runtime):
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not set(engines(runtime)) & set(pids))
    await until(lambda: not any(replica.is_ready for replica in ray.replicas))
    await ray.all_serve()
    served, pids = ray.endpoints, engines(runtime)
    assert len(set(served)) == len(pids) == 2

    # The driver is killed: nothing is lost meanwhile, and the next driver finds all again.
    ray.drivers[-1].send(signal.SIGKILL)
    await until(lambda: len(ray.drivers) == 2)
    assert ray.endpoints == served
    assert engines(runtime) == pids

    # An engine is killed: another takes its place, also with this driver.
    os.kill(pids[0], signal.SIGKILL)
    await until(lambda: ray.endpoints != served)
    await ray.all_serve()
    assert len(set(engines(runtime)) & set(pids)) == 1
    assert len(engines(runtime)) == 2

    # Replicas that are not wanted any more end.
    for replica in ray.replicas:
        replica.stop()
    await asyncio.gather(*replicas)
    assert engines(runtime) == []
    running.cancel()
    await asyncio.wait([running])
    await until(lambda: ray.drivers[-1].exited.done())


@pytest.mark.ray
def test_engines_outlive_drivers_and_are_replaced_when_they_or_their_actors_die(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A short path: sockets of Ray lie in it.
    with tempfile.TemporaryDirectory(prefix="tgi", dir="/tmp") as name:
        folder = Path(name)
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))  # where the actors keep their engines' files
        with local_ray(folder, cpus=1) as (address, environment):
            asyncio.run(life(RayUnderTest(address, environment), runtime))
