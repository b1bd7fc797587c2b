"""Machines on this one: network namespaces with an address each, joined by a bridge. Needs root and iproute2.

Processes, files and memory are shared with the real machine; addresses, ports and cables are not. All of it is removed
by a process of its own, also after a crash of the one that made it.

    with Network(3) as network:
        network.machines[0].start(["program", "argument"], log)
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import slow_link
from slow_link import Slowness

# A name of a network interface has at most 15 characters, so names consist of a prefix, a number and a letter.
PREFIX = "tgim"
MAX_NETWORKS = 200
END_LIMIT_S = 60.0
WITHOUT = "needs network namespaces: run as root, with the program `ip` of iproute2 and kernel support for bridges"


def ip(*words: str) -> str:
    """The output of `ip words…`. RuntimeError, with what it said, if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=END_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def can_be_made() -> bool:
    """Whether networks can be made here."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    try:
        with Network(1):
            return True
    except RuntimeError:
        return False


class Machine:
    """One namespace. Its cable is a pair of interfaces: eth0 inside, and one at the bridge."""

    def __init__(self, namespace: str, port: str, address: str, bridges: tuple[str, str]) -> None:
        """`port` is the interface at the bridge. `bridges`: the usual one, and that of cut-off machines."""
        self.namespace = namespace
        self.port = port
        self.address = address
        self.bridge, self._other_bridge = bridges
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Starts a program there, whose output is added to `log`. The process's pid is the program's."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment or {}),
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        return [int(line) for line in ip("netns", "pids", self.namespace).split()]

    def kill(self) -> int:
        """Kills all processes there, and returns the number of them."""
        living = set(self.pids())
        for process in self._started:
            process.kill()  # also one that is still on its way into the namespace
        living |= kill_all(self.namespace)
        self.collect()
        return len(living)

    def collect(self) -> None:
        """Collects the statuses of the processes that were started, all of which have ended."""
        for process in self._started:
            process.wait(timeout=END_LIMIT_S)
        self._started.clear()

    def unplug(self) -> None:
        """Pulls the cable: both ends lose their carrier. Connections stay open, as after a power cut."""
        ip("link", "set", self.port, "down")

    def plug(self) -> None:
        ip("link", "set", self.port, "up")

    def cut_off(self) -> None:
        """Moves the cable to the other bridge: it still has a carrier, but reaches cut-off machines only."""
        ip("link", "set", self.port, "master", self._other_bridge)

    def join(self) -> None:
        ip("link", "set", self.port, "master", self.bridge)

    @contextlib.contextmanager
    def slowed(self, slowness: Slowness, seed: int) -> Iterator[None]:
        """A slow cable while the context is open."""
        near, far = self.port.replace("p", "s"), self.port.replace("p", "t")
        ip("link", "add", near, "type", "veth", "peer", "name", far)
        ip("link", "set", self.port, "nomaster")
        words = ["--delay", slowness.delay_s, "--drop", slowness.drop, "--seed", seed]
        words += ["--freeze-every", slowness.freeze_every_s, "--freeze-for", slowness.freeze_for_s]
        link = subprocess.Popen([sys.executable, slow_link.__file__, self.port, near, *map(str, words)])
        try:
            ip("link", "set", far, "master", self.bridge)
            for name in (near, far):
                ip("link", "set", name, "up")
            yield
            if link.poll() is not None:
                raise RuntimeError(f"the slow cable of {self.namespace} has ended with status {link.returncode}")
        finally:
            link.kill()
            link.wait()
            ip("link", "delete", near)
            self.join()


class Network:
    """Machines while the context is open. `address` is this machine's own on their bridge."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.machines: list[Machine] = []
        self.address = ""
        self._remover: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        number = self._claim()
        # From here on the remover takes away what this process makes, as soon as its input ends.
        self._remover = subprocess.Popen(
            [sys.executable, __file__, "remove", str(number)], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            self._make(number)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _claim(self) -> int:
        """The first number whose bridge does not exist: making it is the claim."""
        problem = ""
        for number in range(MAX_NETWORKS):
            try:
                # Without an address of its own a bridge takes that of a port. Peers lose the bridge when it changes.
                ip("link", "add", _bridge(number), "address", f"02:00:00:00:77:{number:02x}", "type", "bridge")
                return number
            except RuntimeError as error:
                problem = str(error)
                if "File exists" not in problem:
                    break
        raise RuntimeError(f"{WITHOUT} ({problem})")

    def _make(self, number: int) -> None:
        bridge, other = _bridge(number), f"{PREFIX}{number}o"
        ip("link", "add", other, "type", "bridge")
        self.address = f"10.77.{number}.1"
        ip("address", "add", f"{self.address}/24", "dev", bridge)
        for name in (bridge, other):
            ip("link", "set", name, "up")
        for place in range(self._count):
            machine = Machine(
                f"machines-{number}-{place}",
                f"{PREFIX}{number}p{place}",
                f"10.77.{number}.{place + 2}",
                (bridge, other),
            )
            ip("netns", "add", machine.namespace)
            ip("link", "add", machine.port, "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
            ip("-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", "eth0")
            for inside in ("lo", "eth0"):
                ip("-n", machine.namespace, "link", "set", inside, "up")
            machine.join()
            machine.plug()
            self.machines.append(machine)

    def _remove(self) -> None:
        assert self._remover is not None and self._remover.stdin is not None
        self._remover.stdin.close()
        status = self._remover.wait(timeout=END_LIMIT_S)
        for machine in self.machines:
            machine.collect()
        if status:
            raise RuntimeError("a machine's processes or interfaces could not be removed; the line above has the cause")


def kill_all(namespace: str, limit_s: float = END_LIMIT_S) -> set[int]:
    """Kills every process in the namespace, also those that are started meanwhile. Returns their ids."""
    killed: set[int] = set()
    until_s = time.monotonic() + limit_s
    while living := [int(line) for line in ip("netns", "pids", namespace).split()]:
        if time.monotonic() > until_s:
            raise RuntimeError(f"processes {living} of {namespace} do not end within {limit_s} s of SIGKILL")
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(living)
        time.sleep(0.005)
    return killed


def remove(number: int) -> None:
    """Removes a network with all processes of its machines."""
    for namespace in list(_namespaces(number)):
        kill_all(namespace)
        ip("netns", "delete", namespace)
    ours = re.compile(rf"{PREFIX}{number}[a-z][0-9]*")
    names = [line.split(":")[1].split("@")[0].strip() for line in ip("-o", "link").splitlines()]
    for name in filter(ours.fullmatch, names):
        if name != _bridge(number):
            with contextlib.suppress(RuntimeError):  # the other end of a pair that is gone already
                ip("link", "delete", name)
    ip("link", "delete", _bridge(number))  # the last, because its name is the claim on all others


def _namespaces(number: int) -> Iterator[str]:
    for line in ip("netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"machines-{number}-"):
            yield name


def _bridge(number: int) -> str:
    return f"{PREFIX}{number}b"


def main() -> None:
    """`remove NUMBER`: waits until the maker of the network closes the input or dies, then removes the network."""
    if len(sys.argv) != 3 or sys.argv[1] != "remove":
        raise SystemExit("this file is a library: its only command is its own")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    remove(int(sys.argv[2]))


if __name__ == "__main__":
    main()
