"""The actors that Ray runs on machines: each keeps one process of ours alive beside itself, and tells what it does.

Arguments and answers are strings and numbers. Ray finds the classes by their names in the tgi-py of the machine.
"""

import asyncio
import os
import subprocess
import time

import ray

from text_generation_common.places import machine_folder
from text_generation_launcher.ray.machine import KeptEngine, MachineEngines
from text_generation_launcher.ray.values import EngineOrder, EnginePhase, EngineState

# Seconds between two looks at the engine.
LOOK_S = 0.2
# Seconds without a call from any driver after which an actor without an engine leaves, and gives its room back.
DESERTED_S = 120.0
# Seconds between two attempts to start an engine on devices that are in use.
RETRY_S = 1.0


class ReplicaHost:
    """Runs one engine. It is an asyncio actor: its methods run beside each other."""

    def __init__(self, owner: str, name: str) -> None:
        self._owner = owner
        self._name = name
        self._node = ray.util.get_node_ip_address()
        self._engine: KeptEngine | None = None
        self._blocked = ""
        self._starting = asyncio.Lock()
        self._called_s = time.monotonic()
        self._leaving = asyncio.create_task(self._leave_when_deserted())

    async def start(self, order: str) -> str:
        """Starts the engine or takes it over, unless this was done before. Returns its state."""
        self._called_s = time.monotonic()
        async with self._starting:
            if self._engine is None:
                parsed = EngineOrder.of(order)
                devices = [str(number) for number in ray.get_gpu_ids()]
                folder = machine_folder(f"ray-{self._node}", os.environ.get("XDG_RUNTIME_DIR", ""))
                machine = MachineEngines(folder, self._node)
                try:
                    # In a thread, since a start waits for a process.
                    found = await asyncio.to_thread(machine.claim, self._owner, self._name, parsed, devices)
                except (OSError, subprocess.SubprocessError) as error:
                    found = f"no engine can be started: {error}"
                if isinstance(found, str):
                    self._blocked = found
                    await asyncio.sleep(RETRY_S)
                else:
                    self._engine = found
        return self._state().text()

    async def watch(self, known: str, seconds: float) -> str:
        """The engine's state once it is no longer `known`, or after some seconds."""
        self._called_s = time.monotonic()
        end_s = asyncio.get_running_loop().time() + seconds
        while (state := self._state().text()) == known and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(LOOK_S)
        return state

    async def end(self) -> str:
        """Asks the engine to end when its requests are done. Returns its state."""
        if self._engine is not None:
            self._engine.end()
        return self._state().text()

    async def _leave_when_deserted(self) -> None:
        """Gives room and actor back when the server was killed and its engine has ended by itself."""
        while True:
            await asyncio.sleep(LOOK_S)
            is_running = self._state().phase in (EnginePhase.STARTING, EnginePhase.SERVING)
            if not is_running and time.monotonic() - self._called_s > DESERTED_S:
                group = ray.util.get_current_placement_group()
                if group is not None:
                    ray.util.remove_placement_group(group)  # with this actor in it
                return

    def _state(self) -> EngineState:
        if self._engine is None:
            return EngineState(EnginePhase.BLOCKED, "", 0, self._node, self._blocked)
        return self._engine.state()
