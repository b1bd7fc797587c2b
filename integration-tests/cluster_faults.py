"""The faults of a deployment on several machines, as rows: each is injected, lasts a while, and is lifted."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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


@dataclass(frozen=True, slots=True)
class Begun:
    """A fault that has begun, and how it is lifted after a while. `end` returns the ports of a front that died."""

    machine: Machine
    target: str
    rows: int
    at_s: float
    end: Callable[[], frozenset[int] | None] = lambda: None
    range_s: tuple[float, float] = SHORT_OR_LONG_S
    pid: int | None = None


Begin = Callable[["Injector"], Begun | None]


@dataclass(slots=True)
class Injector:
    """Injects faults at victims that it draws. A kind of KINDS or, on Ray, of RAY_KINDS too."""

    deployment: Deployment
    rng: random.Random
    kinds: dict[str, Begin] = field(default_factory=lambda: KINDS)

    def inject(self, kind: str) -> ClusterFault:
        """Injects a fault, after the deployment has become whole if no process of that role is alive now."""
        for _ in range(TRIES):
            with contextlib.suppress(psutil.NoSuchProcess):  # the victim has just ended by itself
                if (begun := self.kinds[kind](self)) is not None:
                    return self._lifted(kind, begun)
            self.deployment.until_whole()
        raise RuntimeError(f"{kind}: a whole deployment has no such victim")

    def _lifted(self, kind: str, begun: Begun) -> ClusterFault:
        time.sleep(self.rng.uniform(*begun.range_s))
        ports = begun.end() or frozenset()
        victim = begun.machine.address + (f", process {begun.pid}" if begun.pid else "")
        return ClusterFault(kind, victim, begun.target, begun.at_s, time.time(), begun.rows, ports)

    def draw(self) -> Machine | None:
        """A machine that has a replica."""
        replicas = self.deployment.replicas
        return self.rng.choice(replicas) if replicas else None

    def about(self, machine: Machine) -> tuple[str, int]:
        """The engine's address, and the number of its requests."""
        return self.deployment.target(machine), self.deployment.rows(machine)


def hurt_process(injector: Injector, role: str, is_killed: bool, is_beside: bool = False) -> Begun | None:
    """Kills or stops a process of a replica. `is_beside`: no stream passes through it, so its stop hits none."""
    machine = injector.draw()
    victims = injector.deployment.find(machine, role) if machine is not None else []
    if machine is None or not victims:
        return None
    victim, (target, rows) = injector.rng.choice(victims), injector.about(machine)
    at_s = time.time()
    rows = 0 if is_beside and not is_killed else rows
    if not is_killed:
        return Begun(machine, target, rows, at_s, _stopped(victim), pid=victim.pid)
    victim.kill()
    if role == "launcher":
        injector.deployment.restart_launcher(machine)
    return Begun(machine, target, rows, at_s, range_s=(0, 0), pid=victim.pid)


def _stopped(victim: psutil.Process) -> Callable[[], None]:
    """Stops a process. Returns what lets it go on, if nothing has killed it."""
    victim.send_signal(signal.SIGSTOP)

    def end() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGCONT)

    return end


def hurt_front(injector: Injector, is_killed: bool) -> Begun | None:
    fronts = injector.deployment.fronts()
    if len(fronts) < 2:
        return None
    victim, at_s = injector.rng.choice(fronts), time.time()
    go_on = _stopped(victim)  # a front takes no connection between the look at them and its death
    ports = client_ports(victim)

    def end() -> frozenset[int] | None:
        """The ports, if the front has died."""
        if is_killed:
            victim.kill()
            return ports
        go_on()
        try:
            return ports if victim.status() == psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return ports

    range_s = (0.0, 0.0) if is_killed else FRONT_STOP_S
    return Begun(injector.deployment.front_machine, "", len(ports), at_s, end, range_s, victim.pid)


def hurt_driver(injector: Injector, is_killed: bool) -> Begun | None:
    """The process of the fronts' launcher that asks Ray for replicas, if it is alive."""
    machine = injector.deployment.front_machine
    for driver in injector.deployment.find(machine, "driver"):
        at_s = time.time()
        if not is_killed:
            return Begun(machine, "", 0, at_s, _stopped(driver), pid=driver.pid)
        driver.kill()
        return Begun(machine, "", 0, at_s, range_s=(0, 0), pid=driver.pid)
    return None


def hurt_head(injector: Injector) -> Begun:
    deployment, at_s = injector.deployment, time.time()
    deployment.kill_head()
    return Begun(deployment.front_machine, "", 0, at_s, deployment.start_head)


def hurt_machine(
    injector: Injector, begin: Callable[[Deployment, Machine], None], end: Callable[[Deployment, Machine], None]
) -> Begun | None:
    machine, deployment = injector.draw(), injector.deployment
    if machine is None:
        return None
    target, rows = injector.about(machine)
    at_s = time.time()
    begin(deployment, machine)
    return Begun(machine, target, rows, at_s, lambda: end(deployment, machine))


def lose_power(deployment: Deployment, machine: Machine) -> None:
    """The other machines are told of nothing."""
    machine.unplug()
    deployment.kill_machine(machine)


def power_is_back(deployment: Deployment, machine: Machine) -> None:
    machine.plug()
    deployment.start_machine(machine)


def stop_all(_: Deployment, machine: Machine) -> None:
    signal_all(machine, signal.SIGSTOP)
    signal_all(machine, signal.SIGSTOP)  # also those that were started by a process that is stopped now


def scale(injector: Injector) -> Begun | None:
    """Two replicas are asked to leave, and come again once they have left."""
    deployment = injector.deployment
    if len(deployment.replicas) < 3:
        return None
    leaving = injector.rng.sample(deployment.replicas, 2)
    rows, at_s = sum(map(deployment.rows, leaving)), time.time()
    have_left = False
    try:
        have_left = deployment.leave(leaving)
    finally:
        if not have_left:
            deployment.come_back(leaving)
    return Begun(leaving[0], "", rows, at_s, lambda: deployment.come_back(leaving)) if have_left else None


def slow_down(injector: Injector) -> Begun | None:
    machine, rng = injector.draw(), injector.rng
    if machine is None:
        return None
    freezes = rng.random() < 0.5
    slowness = Slowness(
        delay_s=rng.uniform(0.005, 0.2),
        drop=rng.uniform(0, 0.03),
        freeze_every_s=rng.uniform(0.5, 2) if freezes else 0.0,
        freeze_for_s=rng.uniform(0.2, 5) if freezes else 0.0,
    )
    target, rows = injector.about(machine)
    stack, at_s = contextlib.ExitStack(), time.time()
    stack.enter_context(machine.slowed(slowness, rng.randrange(2**31)))
    return Begun(machine, target, rows, at_s, stack.close, SLOW_FOR_S)


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


def _pair(what: str, hurt: Callable[..., Begun | None], **options: object) -> dict[str, Begin]:
    """The rows of a process that is killed, and that is stopped for a while."""
    kinds = (("killed", True), ("stopped", False))
    return {f"{what} {how}": partial(hurt, is_killed=is_killed, **options) for how, is_killed in kinds}


KINDS: dict[str, Begin] = {
    **_pair("shard", hurt_process, role="shard"),
    **_pair("engine", hurt_process, role="engine"),
    **_pair("launcher", hurt_process, role="launcher"),
    **_pair("front", hurt_front),
    # All processes die; the kernel, which lives, tells the other machines that their connections end.
    "machine killed": partial(hurt_machine, begin=lambda d, m: d.kill_machine(m), end=lambda d, m: d.start_machine(m)),
    "machine stopped": partial(hurt_machine, begin=stop_all, end=lambda _, m: signal_all(m, signal.SIGCONT)),
    "power lost": partial(hurt_machine, begin=lose_power, end=power_is_back),
    "cable pulled": partial(hurt_machine, begin=lambda _, m: m.unplug(), end=lambda _, m: m.plug()),
    "partition": partial(hurt_machine, begin=lambda _, m: m.cut_off(), end=lambda _, m: m.join()),
    "slow link": slow_down,
    "3 to 1 to 3 replicas": scale,
}
RAY_KINDS: dict[str, Begin] = KINDS | {
    # A replica's engine ends with its actor, and an actor with its raylet.
    **_pair("actor", hurt_process, role="actor", is_beside=True),
    **_pair("raylet", hurt_process, role="raylet", is_beside=True),
    **_pair("driver", hurt_driver),
    "head killed": hurt_head,
}
