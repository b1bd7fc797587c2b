"""The actors that Ray runs on machines: each runs one launcher as its child, and reports its state. The launcher ends
with its actor.

Arguments and answers are bytes of JSON, strings and numbers. Ray finds the classes by their names in the tgi-py that is
installed on the machine.
"""

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from text_generation_common.autoscaling import Demand
from text_generation_common.errors import CommandError
from text_generation_common.json_values import as_json, from_fields, from_json
from text_generation_common.places import chosen, machine_folder
from text_generation_launcher.control_call import send_command
from text_generation_launcher.process import PARENT_ENDED
from text_generation_launcher.ray.machine import HostedLauncher, new_folder, private
from text_generation_launcher.ray.values import ENGINES_FILE, SOCKETS, EngineOrder, EnginePhase, EngineState, FrontOrder

# Seconds between two checks of the engine's state.
LOOK_S = 0.2
# Seconds without a call from any driver after which an actor without an engine ends, and frees its room.
DESERTED_S = 120.0
# Seconds between two status requests to the launcher of fronts.
ASK_S = 1.0


class ReplicaHost:
    """Runs one engine. An asyncio actor: its methods run concurrently, on one thread."""

    def __init__(self) -> None:
        self._node = ray.util.get_node_ip_address()
        self._launcher: HostedLauncher | None = None
        self._failure = ""  # why nothing could be started
        self._called_s = time.monotonic()
        self._leaving = asyncio.create_task(self._leave_when_deserted())

    async def start(self, order: bytes) -> bytes:
        """Starts the engine, unless this was done before. Returns its state."""
        self._called_s = time.monotonic()
        if self._launcher is None and not self._failure:
            try:
                self._launcher = self._start(order)
            except (OSError, CommandError) as error:
                self._failure = f"nothing can be started: {error}"
        return as_json(self._state())

    async def watch(self, known: bytes, seconds: float) -> bytes:
        """The engine's state, as soon as it differs from `known`, or after `seconds`."""
        self._called_s = time.monotonic()
        end_s = asyncio.get_running_loop().time() + seconds
        while (state := as_json(self._state())) == known and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(LOOK_S)
        return state

    async def end(self) -> bytes:
        """Asks the engine to end when its requests are done. Returns its state."""
        if self._launcher is not None:
            self._launcher.end()
        return as_json(self._state())

    async def _leave_when_deserted(self) -> None:
        """Ends the actor and frees its room when the server was killed and its engine has ended by itself."""
        while True:
            await asyncio.sleep(LOOK_S)
            is_running = self._launcher is not None and self._state().phase is not EnginePhase.ENDED
            if not is_running and time.monotonic() - self._called_s > DESERTED_S:
                group = ray.util.get_current_placement_group()
                if group is not None:
                    ray.util.remove_placement_group(group)  # Ray ends this actor, too
                else:
                    os._exit(0)
                return

    def _start(self, order: bytes) -> HostedLauncher:
        devices = [str(number) for number in ray.get_gpu_ids()]
        return HostedLauncher(from_json(EngineOrder, order), self._node, self._folder("ray"), devices)

    def _folder(self, kind: str) -> Path:
        return new_folder(machine_folder(f"{kind}-{self._node}", os.environ.get("XDG_RUNTIME_DIR", "")))

    def _state(self) -> EngineState:
        if self._launcher is not None:
            return self._launcher.state()
        phase = EnginePhase.ENDED if self._failure else EnginePhase.STARTING
        return EngineState(phase, node=self._node, why=self._failure)


class FrontHost(ReplicaHost):
    """Runs the fronts of one machine: a launcher that follows a file with the engines' addresses. When the actor ends,
    the fronts are asked to end: the answers that they have begun are finished."""

    def __init__(self) -> None:
        super().__init__()
        self._order: FrontOrder | None = None
        self._engines = ""  # text of the file with the engines' addresses
        self._restart: str | None = None  # name of the newest restart that is done
        self._serves = False
        self._demand: Demand | None = None
        self._asking = asyncio.create_task(self._ask_again_and_again())

    async def report_engines(self, engines: str, restart: str) -> None:
        """Makes the fronts use the engines at these addresses, which are separated by commas. An empty text changes
        nothing: the driver may know of no engine yet. `restart`: a name; fronts that are older than the restart of
        this name are replaced, one after another."""
        if engines and engines != self._engines:
            self._engines = engines
            self._write_engines()
        if self._restart is None:  # The fronts have just started, so the newest restart counts as done.
            self._restart = restart
        if restart and restart != self._restart:
            with suppress(CommandError):  # The launcher starts, ends, or is busy: the driver calls again.
                await self._command("restart-fronts")
                self._restart = restart

    async def start(self, order: bytes) -> bytes:
        state = await super().start(order)
        self._write_engines()
        return state

    def _start(self, order: bytes) -> HostedLauncher:
        self._order = from_json(FrontOrder, order)
        return HostedLauncher(self._order, self._node, self._folder("ray-fronts"), last_signal=PARENT_ENDED)

    def _write_engines(self) -> None:
        if self._launcher is not None and self._engines:
            path = self._launcher.folder / ENGINES_FILE
            partial_path = path.with_suffix(".partial")
            with open(partial_path, "w", opener=private) as file:
                file.write(self._engines.replace(",", "\n") + "\n")
            os.replace(partial_path, path)

    async def _ask_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(ASK_S)
            with suppress(CommandError):  # The launcher starts, ends, or is busy.
                answer = await self._command("front")
                self._serves = bool(answer["listens"])
                self._demand = None if answer["demand"] is None else from_fields(Demand, answer["demand"])

    async def _command(self, name: str) -> Any:
        """Sends a command to the launcher of the fronts, and returns its answer. CommandError if there is none."""
        if self._launcher is None:
            raise CommandError("there is no launcher of fronts yet")
        socket = chosen(str(self._launcher.folder / SOCKETS)).control_socket
        return await asyncio.to_thread(send_command, socket, {"command": name})

    def _state(self) -> EngineState:
        state = super()._state()
        if state.phase is not EnginePhase.STARTING or not self._serves or self._order is None:
            return state
        host = f"[{self._node}]" if ":" in self._node else self._node
        return replace(state, phase=EnginePhase.SERVING, address=f"{host}:{self._order.port}", demand=self._demand)
