"""The actors that Ray runs on machines: each keeps one process of ours alive beside itself, and tells what it does.

Arguments and answers are strings and numbers. Ray finds the classes by their names in the tgi-py of the machine.
"""

import asyncio
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from text_generation_common.autoscaling import Demand
from text_generation_common.errors import CommandError
from text_generation_common.places import chosen, machine_folder
from text_generation_launcher.control_call import send_command
from text_generation_launcher.ray.machine import KeptEngine, MachineEngines
from text_generation_launcher.ray.starter import private
from text_generation_launcher.ray.values import (
    ENGINES_FILE,
    RESTART_FILE,
    SOCKETS,
    EngineOrder,
    EnginePhase,
    EngineState,
    FrontOrder,
)

# Seconds between two looks at the engine.
LOOK_S = 0.2
# Seconds without a call from any driver after which an actor without an engine leaves, and gives its room back.
DESERTED_S = 120.0
# Seconds between two attempts to start an engine on devices that are in use.
RETRY_S = 1.0
# Seconds between two questions to the launcher of fronts.
ASK_S = 1.0


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
                try:
                    # In a thread, since a start waits for a process.
                    found = await asyncio.to_thread(self._claim(order))
                except (OSError, subprocess.SubprocessError) as error:
                    found = f"nothing can be started: {error}"
                if isinstance(found, str):
                    self._blocked = found
                    await asyncio.sleep(RETRY_S)
                else:
                    self._engine = found
                    self._has_claimed()
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
                else:
                    os._exit(0)
                return

    def _claim(self, order: str) -> Callable[[], KeptEngine | str]:
        devices = [str(number) for number in ray.get_gpu_ids()]
        return partial(self._machine("ray", "GPU").claim, self._owner, self._name, EngineOrder.of(order), devices)

    def _has_claimed(self) -> None:
        """Called once the engine was started or taken over."""

    def _machine(self, folder: str, kind: str) -> MachineEngines:
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        return MachineEngines(machine_folder(f"{folder}-{self._node}", runtime), self._node, kind)

    def _state(self) -> EngineState:
        if self._engine is None:
            return EngineState(EnginePhase.BLOCKED, "", 0, self._node, self._blocked)
        return self._engine.state()


class FrontHost(ReplicaHost):
    """Runs the fronts of one machine: a launcher that follows a file with the engines' addresses."""

    def __init__(self, owner: str, name: str) -> None:
        super().__init__(owner, name)
        self._order: FrontOrder | None = None
        self._engines = ""  # the text of the file
        self._restart = ""  # name of the newest restart
        self._serves = False
        self._demand: Demand | None = None
        self._asking = asyncio.create_task(self._ask_again_and_again())

    async def tell(self, engines: str, restart: str) -> None:
        """From now on the fronts use the engines with these addresses, with commas between. None at all changes
        nothing: their driver may know of no engine yet. Fronts that are older than the restart of this name are
        replaced, one after another."""
        if engines and engines != self._engines:
            self._engines = engines
            self._write_engines()
        self._restart = restart
        if self._engine is not None and restart and restart != self._file(RESTART_FILE).read_text():
            with suppress(CommandError):  # The launcher starts, ends, or is busy: the driver tells it again.
                await self._command("restart-fronts")
                self._write(RESTART_FILE, restart)

    def _claim(self, order: str) -> Callable[[], KeptEngine | str]:
        self._order = FrontOrder.of(order)
        machine = self._machine("ray-fronts", "port")
        return partial(machine.claim, self._owner, self._name, self._order, [str(self._order.port)])

    def _has_claimed(self) -> None:
        self._write_engines()
        if not self._file(RESTART_FILE).exists():  # The fronts are new, so no earlier restart concerns them.
            self._write(RESTART_FILE, self._restart)

    def _write_engines(self) -> None:
        if self._engine is not None and self._engines:
            self._write(ENGINES_FILE, self._engines.replace(",", "\n") + "\n")

    def _file(self, name: str) -> Path:
        assert self._engine is not None
        return self._engine.folder / name

    def _write(self, name: str, text: str) -> None:
        path = self._file(name)
        partial_path = path.with_suffix(".partial")
        with open(partial_path, "w", opener=private) as file:
            file.write(text)
        os.replace(partial_path, path)

    async def _ask_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(ASK_S)
            with suppress(CommandError):  # The launcher starts, ends, or is busy.
                told = await self._command("front")
                self._serves = bool(told["listens"])
                self._demand = None if told["demand"] is None else Demand(**told["demand"])

    async def _command(self, name: str) -> Any:
        """Sends a command to the launcher of the fronts, and returns its answer. CommandError if there is none."""
        if self._engine is None:
            raise CommandError("there is no launcher of fronts yet")
        socket = chosen(str(self._engine.folder / SOCKETS)).control_socket
        return await asyncio.to_thread(send_command, socket, {"command": name})

    def _state(self) -> EngineState:
        state = super()._state()
        if state.phase is not EnginePhase.STARTING or not self._serves or self._order is None:
            return state
        host = f"[{self._node}]" if ":" in self._node else self._node
        return replace(state, phase=EnginePhase.SERVING, address=f"{host}:{self._order.port}", demand=self._demand)
