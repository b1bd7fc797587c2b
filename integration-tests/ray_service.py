"""Keeps Ray running on its machines, as the service manager of each machine does: starts it again when it has ended."""

import threading
import time
from collections.abc import Callable, Mapping

import psutil
from machines import Machine
from ray_nodes import RayNodes

LOOK_S = 0.25
# Seconds before a service that has failed to start is started again.
RETRY_S = 1.0
END_LIMIT_S = 150.0


class RayService:
    """From `start` to `end` each machine that is on has a node of Ray; the first machine's is the head."""

    def __init__(self, nodes: RayNodes, environment: Callable[[Machine], Mapping[str, str]]) -> None:
        """`environment`: what the nodes of a machine have beside Ray's own variables."""
        self._keepers = [
            _NodeKeeper(nodes, number, environment(machine)) for number, machine in enumerate(nodes.machines)
        ]

    def start(self) -> None:
        for keeper in self._keepers:
            keeper.thread.start()

    def end(self) -> None:
        """Starts nothing more."""
        for keeper in self._keepers:
            keeper.turn_off(lambda: None, for_ever=True)

    def join(self) -> None:
        """Waits for the threads, after `end` and the ends of the machines' processes."""
        for keeper in self._keepers:
            if keeper.thread.ident is not None:
                keeper.thread.join(END_LIMIT_S)

    def turn_off(self, number: int, kill: Callable[[], object]) -> None:
        """Calls `kill`, which ends what is to end with the node, and starts nothing before `turn_on`."""
        self._keepers[number].turn_off(kill)

    def turn_on(self, number: int) -> None:
        self._keepers[number].is_on = True

    def missing(self) -> str:
        """Which nodes do not run, and why; empty if all do."""
        return "; ".join(keeper.missing() for keeper in self._keepers if keeper.missing())


class _NodeKeeper:
    def __init__(self, nodes: RayNodes, number: int, environment: Mapping[str, str]) -> None:
        self._nodes = nodes
        self._number = number
        self._environment = environment
        # Held from the look at `is_on` to the start, so that no process starts on a machine that is off.
        self._lock = threading.Lock()
        self._raylet: psutil.Process | None = None
        self._problem = ""
        self._is_over = False
        self.is_on = True
        self.thread = threading.Thread(target=self._run, daemon=True)

    def turn_off(self, kill: Callable[[], object], for_ever: bool = False) -> None:
        with self._lock:
            self.is_on = False
            self._is_over = self._is_over or for_ever
            kill()
            self._raylet = None

    def missing(self) -> str:
        if self._runs():
            return ""
        return f"node {self._number} of Ray does not run{': ' * bool(self._problem)}{self._problem}"

    def _runs(self) -> bool:
        raylet = self._raylet
        try:
            return raylet is not None and raylet.is_running() and raylet.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def _run(self) -> None:
        while not self._is_over:
            if self._runs() or not self.is_on:
                time.sleep(LOOK_S)
                continue
            try:
                self._start()
            except RuntimeError as error:
                self._problem = str(error)
            if not self._runs():
                time.sleep(RETRY_S)

    def _start(self) -> None:
        with self._lock:
            if not self.is_on:
                return
            self._nodes.end(self._number)
            starting = self._nodes.begin(self._number, self._number == 0, self._environment)
        self._nodes.joined(self._number, starting)
        with self._lock:
            if self.is_on:
                self._raylet = self._nodes.raylet(self._number)
            else:  # The command was still on its way to its machine when the node was turned off.
                self._nodes.end(self._number)
