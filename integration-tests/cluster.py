"""Fronts on one machine and replicas on others, with mutual TLS: what all ways to start them share, and replicas whose
launchers are started on their machines. `cluster_ray.py` has Ray choose the machines."""

import contextlib
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import processes
import psutil
from logs import Notice, NoticeLog
from machines import Machine, Network
from server_process import LAUNCHER, wait_until

from text_generation_benchmark.metrics import metric

FRONTS = 2
API_PORT = 3000
START_LIMIT_S, WHOLE_LIMIT_S, LOOK_S = 180.0, 180.0, 0.2
# Short warm-up, prompts of several chunks, and one thread for each shard: several replicas share the cores.
ARGUMENTS = (
    *("--dtype", "float32", "--json-output", "--max-total-tokens", "1536", "--max-batch-prefill-tokens", "1024"),
    *("--max-batch-total-tokens", "65536", "--max-concurrent-requests", "256", "--enable-prefill-logprobs"),
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
ENGINE_PORT, METRICS_PORT = 5000, 5001
# Longest time in seconds that a replica may take to leave: its requests move, and those of a long text may end there.
LEAVE_LIMIT_S = 120.0
# Programs whose processes are the roles of a machine.
PROGRAMS = {
    "shard": "text-generation-server",
    "engine": "text-generation-engine",
    "launcher": "text-generation-launcher",
    "front": "text-generation-router",
}


class Deployment(ABC):
    """The first machine has the fronts; replicas are on others. `url` is the API's."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        arguments: Sequence[str] = ARGUMENTS,
        failpoints: str = "",
        launcher: Path = LAUNCHER,
    ) -> None:
        """`folder` gets certificates, sockets and logs. `arguments` are those of every launcher. `failpoints`:
        rules for the replicas' processes, as in FAILPOINTS."""
        self.front_machine, *self.others = network.machines
        self.folder = folder
        self.failpoints = failpoints
        self.url = f"http://{self.front_machine.address}:{API_PORT}"
        self._arguments = arguments
        self._launcher = str(launcher)
        self._launchers: dict[str, subprocess.Popen[bytes]] = {}
        self._notices = NoticeLog(self._log(self.front_machine))

    def __enter__(self) -> Self:
        machines = [self.front_machine, *self.others]
        words = ["certs", str(self.tls), *(machine.address for machine in machines)]
        self.command(*words)
        try:
            self._start_all()
            self.until_whole(START_LIMIT_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in [self.front_machine, *self.others]:
            machine.kill()

    @property
    def tls(self) -> Path:
        return self.folder / "tls"

    @abstractmethod
    def _start_all(self) -> None: ...

    @property
    @abstractmethod
    def replicas(self) -> list[Machine]:
        """The machines that have a replica."""

    @abstractmethod
    def target(self, machine: Machine) -> str:
        """Address of the engine on a machine; empty if there is none."""

    @abstractmethod
    def rows(self, machine: Machine) -> int:
        """Number of requests that a replica computes; 0 if it does not say so at once."""

    @abstractmethod
    def kill_machine(self, machine: Machine) -> None:
        """All its processes die, and none is started before `start_machine`."""

    @abstractmethod
    def start_machine(self, machine: Machine) -> None:
        """Starts what the service manager of a machine starts with the machine."""

    @abstractmethod
    def restart_launcher(self, machine: Machine) -> None:
        """Does what follows when the launcher of a replica has died."""

    @abstractmethod
    def leave(self, machines: Sequence[Machine]) -> bool:
        """Has the replicas there leave, or as many others, and returns when they have left. False if they cannot."""

    @abstractmethod
    def come_back(self, machines: Sequence[Machine]) -> None:
        """Has the replicas that have left start again; also some, after `leave` has failed."""

    @abstractmethod
    def missing(self) -> str:
        """What is missing for the deployment to be whole; empty if nothing is."""

    def command(self, *words: str, environment: Mapping[str, str] | None = None) -> None:
        """Runs a command of the launcher's to its end. RuntimeError, with what it said, if it fails."""
        kept = {"env": environment, "capture_output": True, "text": True, "timeout": START_LIMIT_S}
        done = subprocess.run([self._launcher, *words], check=False, **kept)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")

    def runtime(self, machine: Machine) -> Path:
        """The folder for sockets of a machine's processes."""
        found = self.folder / machine.namespace
        found.mkdir(mode=0o700, exist_ok=True)
        return found

    def start_launcher(self, machine: Machine, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._launchers[machine.namespace] = machine.start(
            [self._launcher, *self._arguments, *words, "--tls-dir", str(self.tls)],
            self._log(machine),
            ENVIRONMENT | {"XDG_RUNTIME_DIR": str(self.runtime(machine))} | dict(environment),
        )

    def start_fronts(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        where = ["--hostname", self.front_machine.address, "--port", str(API_PORT), "--api-workers", str(FRONTS)]
        self.start_launcher(self.front_machine, [*where, *words], environment)

    def launcher(self, machine: Machine) -> "subprocess.Popen[bytes]":
        """The launcher that was started there."""
        return self._launchers[machine.namespace]

    def has_ended(self, machine: Machine) -> bool:
        """Whether the launcher that was started there has ended."""
        return self.launcher(machine).poll() is not None

    def _log(self, machine: Machine) -> Path:
        return self.folder / f"{machine.namespace}.log"

    def is_role(self, process: psutil.Process, role: str) -> bool:
        return processes.runs(process, PROGRAMS[role])

    def find(self, machine: Machine, role: str) -> list[psutil.Process]:
        """The living processes of a role (see PROGRAMS) on a machine."""
        found = []
        for pid in machine.pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if self.is_role(process, role) and processes.living([process]):
                    found.append(process)
        # A launcher's janitor has its command line too; it is a child of the launcher.
        pids = {process.pid for process in found}
        return [process for process in found if process.ppid() not in pids]

    def fronts(self) -> list[psutil.Process]:
        return self.find(self.front_machine, "front")

    def notices(self) -> list[Notice]:
        """What the fronts have logged of engines, in order."""
        return self._notices.read()

    def log_of(self, machine: Machine) -> str:
        return self._log(machine).read_text(errors="replace")

    def until_whole(self, limit_s: float = WHOLE_LIMIT_S) -> None:
        """Waits until every replica is ready and every front is connected to all of them."""
        until_s = time.monotonic() + limit_s
        while problem := self.missing():
            if time.monotonic() > until_s:
                raise RuntimeError(f"the deployment is not whole within {limit_s} s: {problem}")
            time.sleep(LOOK_S)

    def missing_connections(self, targets: Sequence[str]) -> str:
        """Whether every front is connected to every engine, as far as their logs tell."""
        lost = {(notice.front, notice.target): notice.is_lost for notice in self.notices()}
        lost = {ends: is_lost for ends, is_lost in lost.items() if ends[1] in targets}
        if len(lost) < FRONTS * len(targets) or any(lost.values()) or len(self.fronts()) < FRONTS:
            return f"{len(self.fronts())} fronts; whether front and engine have lost each other: {lost}"
        return ""


class DeploymentByHand(Deployment):
    """Each machine but the first has a replica, at the same address for ever."""

    @property
    def targets(self) -> list[str]:
        return [f"{machine.address}:{ENGINE_PORT}" for machine in self.others]

    @property
    def replicas(self) -> list[Machine]:
        return self.others

    def target(self, machine: Machine) -> str:
        return self.targets[self.others.index(machine)]

    def _start_all(self) -> None:
        for machine in self.others:
            self.start_machine(machine)
        self.start_fronts(["--engines", ",".join(self.targets)], {})

    def start_machine(self, machine: Machine) -> None:
        words = ["--engine-only", "--engine-address", f"{machine.address}:{ENGINE_PORT}"]
        words += ["--engine-metrics-port", str(METRICS_PORT)]
        words += ["--testing"] if self.failpoints else []
        self.start_launcher(machine, words, {"FAILPOINTS": self.failpoints})

    def kill_machine(self, machine: Machine) -> None:
        machine.kill()

    def restart_launcher(self, machine: Machine) -> None:
        """What a service manager does: ends what is left of a service, and starts it again."""
        machine.kill()
        self.start_machine(machine)

    def leave(self, machines: Sequence[Machine]) -> bool:
        launchers = [self.find(machine, "launcher") for machine in machines]
        if not all(launchers):
            return False
        for (launcher,) in launchers:
            launcher.terminate()
        wait_until(lambda: all(map(self.has_ended, machines)), LEAVE_LIMIT_S, "replicas leave")
        return True

    def come_back(self, machines: Sequence[Machine]) -> None:
        for machine in machines:
            if self.has_ended(machine):
                self.start_machine(machine)

    def rows(self, machine: Machine) -> int:
        try:
            page = httpx.get(f"http://{machine.address}:{METRICS_PORT}/metrics", timeout=0.5).text
        except httpx.HTTPError:
            return 0
        return int(metric(page, "tgi_batch_current_size"))

    def is_ready(self, machine: Machine) -> bool:
        """Whether the engine says that its shards answer."""
        try:
            return httpx.get(f"http://{machine.address}:{METRICS_PORT}/health", timeout=1.0).status_code == 200
        except httpx.HTTPError:
            return False

    def missing(self) -> str:
        for machine in [self.front_machine, *self.others]:
            if self.has_ended(machine):
                return f"the launcher of {machine.address} has ended: {self.log_of(machine)[-2000:]}"
        unready = [machine.address for machine in self.others if not self.is_ready(machine)]
        return f"unready replicas {unready}" if unready else self.missing_connections(self.targets)
