"""The kinds of faults of a deployment on several machines: each is injected, lasts a while, and is lifted."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from cluster import API_PORT, Deployment
from machines import Machine
from slow_link import Slowness

# Seconds, drawn uniformly, until a stopped process goes on, a cable is back, or a dead machine starts again. The range
# has both sides of the 3 s after which an engine is lost.
SHORT_OR_LONG_S = (0.5, 9.0)
# Seconds for which a front is stopped: its launcher replaces it after 2.25 s.
FRONT_STOP_S = (0.3, 4.0)
SLOW_FOR_S = (3.0, 8.0)
TRIES = 3


@dataclass(frozen=True, slots=True)
class ClusterFault:
    kind: str
    victim: str  # an address, with the pid if it was a process
    target: str  # the engine's address if a replica was the victim; otherwise empty
    at_s: float  # by the wall clock
    lifted_s: float
    rows: int  # requests that the victim computed or, for a front, held open connections of
    # The clients' ports of a front that died.
    ports: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return f"{self.at_s:.2f} +{self.lifted_s - self.at_s:.1f} s: {self.kind}, {self.victim}, {self.rows} requests"


class Injector:
    def __init__(self, deployment: Deployment, rng: random.Random) -> None:
        self._deployment = deployment
        self._rng = rng
        self.kinds: dict[str, Callable[[], ClusterFault | None]] = {
            "shard killed": lambda: self._kill("shard"),
            "engine killed": lambda: self._kill("engine"),
            "launcher killed": lambda: self._kill("launcher"),
            "front killed": self._kill_front,
            "shard stopped": lambda: self._stop("shard"),
            "engine stopped": lambda: self._stop("engine"),
            "launcher stopped": lambda: self._stop("launcher"),
            "front stopped": self._stop_front,
            "machine killed": self._kill_machine,
            "machine stopped": self._stop_machine,
            "power lost": self._lose_power,
            "cable pulled": lambda: self._for_a_while("cable pulled", Machine.unplug, Machine.plug),
            "partition": lambda: self._for_a_while("partition", Machine.cut_off, Machine.join),
            "slow link": self._slow,
            "3 to 1 to 3 replicas": self._scale,
        }

    def inject(self, kind: str) -> ClusterFault:
        """Injects a fault, after the deployment has become whole if no process of that role is alive now."""
        for _ in range(TRIES):
            with contextlib.suppress(psutil.NoSuchProcess):  # the victim has just ended by itself
                fault = self.kinds[kind]()
                if fault is not None:
                    return fault
            self._deployment.until_whole()
        raise RuntimeError(f"{kind}: a whole deployment has no such victim")

    def _draw(self) -> Machine | None:
        """A machine that has a replica."""
        replicas = self._deployment.replicas
        return self._rng.choice(replicas) if replicas else None

    def _about(self, machine: Machine) -> tuple[str, int]:
        """The engine's address, and the number of its requests."""
        return self._deployment.target(machine), self._deployment.rows(machine)

    def _pause(self, range_s: tuple[float, float]) -> None:
        time.sleep(self._rng.uniform(*range_s))

    def _fault(
        self, kind: str, machine: Machine, target: str, at_s: float, rows: int, pid: int | None = None
    ) -> ClusterFault:
        victim = machine.address if pid is None else f"{machine.address}, process {pid}"
        return ClusterFault(kind, victim, target, at_s, time.time(), rows)

    def _kill(self, role: str) -> ClusterFault | None:
        machine = self._draw()
        victims = self._deployment.find(machine, role) if machine is not None else []
        if machine is None or not victims:
            return None
        victim, target, rows = self._rng.choice(victims), *self._about(machine)
        at_s = time.time()
        victim.kill()
        if role == "launcher":
            self._deployment.restart_launcher(machine)
        return self._fault(f"{role} killed", machine, target, at_s, rows, victim.pid)

    def _stop(self, role: str) -> ClusterFault | None:
        machine = self._draw()
        victims = self._deployment.find(machine, role) if machine is not None else []
        if machine is None or not victims:
            return None
        victim, target, rows = self._rng.choice(victims), *self._about(machine)
        at_s = time.time()
        victim.send_signal(signal.SIGSTOP)
        self._pause(SHORT_OR_LONG_S)
        with contextlib.suppress(psutil.NoSuchProcess):  # the launcher has killed the process
            victim.send_signal(signal.SIGCONT)
        return self._fault(f"{role} stopped", machine, target, at_s, rows, victim.pid)

    def _kill_front(self) -> ClusterFault | None:
        fronts = self._deployment.fronts()
        if len(fronts) < 2:
            return None
        victim = self._rng.choice(fronts)
        victim.send_signal(signal.SIGSTOP)  # a front takes no connection between the look at them and its death
        ports, at_s = client_ports(victim), time.time()
        victim.kill()
        return ClusterFault("front killed", f"process {victim.pid}", "", at_s, time.time(), len(ports), ports)

    def _stop_front(self) -> ClusterFault | None:
        fronts = self._deployment.fronts()
        if len(fronts) < 2:
            return None
        victim, at_s = self._rng.choice(fronts), time.time()
        victim.send_signal(signal.SIGSTOP)
        ports = client_ports(victim)
        self._pause(FRONT_STOP_S)
        try:
            victim.send_signal(signal.SIGCONT)
            lives = victim.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            lives = False
        died = frozenset() if lives else ports
        return ClusterFault("front stopped", f"process {victim.pid}", "", at_s, time.time(), len(ports), died)

    def _kill_machine(self) -> ClusterFault | None:
        """All processes die; the kernel, which lives, tells the other machines that their connections end."""
        return self._for_a_while("machine killed", self._deployment.kill_machine, self._deployment.start_machine)

    def _stop_machine(self) -> ClusterFault | None:
        """All processes of a machine are stopped, and go on later."""

        def stop(machine: Machine) -> None:
            signal_all(machine, signal.SIGSTOP)
            signal_all(machine, signal.SIGSTOP)  # also those that were started by a process that is stopped now

        return self._for_a_while("machine stopped", stop, lambda machine: signal_all(machine, signal.SIGCONT))

    def _lose_power(self) -> ClusterFault | None:
        """The other machines are told of nothing."""

        def begin(machine: Machine) -> None:
            machine.unplug()
            self._deployment.kill_machine(machine)

        def end(machine: Machine) -> None:
            machine.plug()
            self._deployment.start_machine(machine)

        return self._for_a_while("power lost", begin, end)

    def _for_a_while(
        self, kind: str, begin: Callable[[Machine], None], end: Callable[[Machine], None]
    ) -> ClusterFault | None:
        machine = self._draw()
        if machine is None:
            return None
        target, rows = self._about(machine)
        at_s = time.time()
        begin(machine)
        self._pause(SHORT_OR_LONG_S)
        end(machine)
        return self._fault(kind, machine, target, at_s, rows)

    def _scale(self) -> ClusterFault | None:
        """Two replicas are asked to leave, and come again once they have left."""
        if len(self._deployment.replicas) < 3:
            return None
        leaving = self._rng.sample(self._deployment.replicas, 2)
        rows, at_s = sum(map(self._deployment.rows, leaving)), time.time()
        try:
            if not self._deployment.leave(leaving):
                return None
            self._pause(SHORT_OR_LONG_S)
        finally:
            self._deployment.come_back(leaving)
        victims = " and ".join(machine.address for machine in leaving)
        return ClusterFault("3 to 1 to 3 replicas", victims, "", at_s, time.time(), rows)

    def _slow(self) -> ClusterFault | None:
        machine, rng = self._draw(), self._rng
        if machine is None:
            return None
        freezes = rng.random() < 0.5
        slowness = Slowness(
            delay_s=rng.uniform(0.005, 0.2),
            drop=rng.uniform(0, 0.03),
            freeze_every_s=rng.uniform(0.5, 2) if freezes else 0.0,
            freeze_for_s=rng.uniform(0.2, 5) if freezes else 0.0,
        )
        target, rows = self._about(machine)
        at_s = time.time()
        with machine.slowed(slowness, rng.randrange(2**31)):
            self._pause(SLOW_FOR_S)
        return self._fault("slow link", machine, target, at_s, rows)


def signal_all(machine: Machine, number: signal.Signals) -> None:
    for pid in machine.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def client_ports(front: psutil.Process) -> frozenset[int]:
    """The clients' ports of the connections that a front has, in whatever namespace it is."""
    folder = Path(f"/proc/{front.pid}")
    inodes = set()
    for link in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(link.readlink().name)
    found = set()
    for line in (folder / "net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if f"socket:[{words[9]}]" in inodes and int(words[1].rpartition(":")[2], 16) == API_PORT:
            found.add(int(words[2].rpartition(":")[2], 16))
    return frozenset(found)


def turns(kinds: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """`count` faults, of all kinds equally often as far as that goes, in a random order."""
    drawn = [kinds[i % len(kinds)] for i in range(count)]
    rng.shuffle(drawn)
    return drawn
