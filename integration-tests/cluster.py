"""Fronts on one machine and a replica on each of several others, with mutual TLS: what is injected, what is asked."""

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import processes
import psutil
from machines import Machine, Network
from server_process import LAUNCHER

from text_generation_benchmark.metrics import metric

FRONTS = 2
API_PORT, ENGINE_PORT, METRICS_PORT = 3000, 5000, 5001
START_LIMIT_S, WHOLE_LIMIT_S = 120.0, 120.0
# Short warm-up, prompts of several chunks, and one thread for each shard: several replicas share the cores.
ARGUMENTS = (
    *("--dtype", "float32", "--json-output", "--max-total-tokens", "1536", "--max-batch-prefill-tokens", "1024"),
    *("--max-batch-total-tokens", "65536", "--max-concurrent-requests", "256", "--enable-prefill-logprobs"),
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
# Programs whose processes are the roles of a replica's machine.
PROGRAMS = {
    "shard": "text-generation-server",
    "engine": "text-generation-engine",
    "launcher": "text-generation-launcher",
    "front": "text-generation-router",
}


@dataclass(frozen=True, slots=True)
class Notice:
    """A line of a front's log: an engine was connected or lost."""

    at_s: float
    target: str
    front: str
    is_lost: bool
    reason: str


class Deployment:
    """The first machine has the fronts; each further one a replica. `url` is the API's."""

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
        self._front_machine, *self.replicas = network.machines
        self._folder = folder
        self._failpoints = failpoints
        self._arguments = arguments
        self.url = f"http://{self._front_machine.address}:{API_PORT}"
        self.targets = [f"{machine.address}:{ENGINE_PORT}" for machine in self.replicas]
        self._launcher = str(launcher)
        self._launchers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        machines = [self._front_machine, *self.replicas]
        words = ["certs", str(self._folder / "tls"), *(machine.address for machine in machines)]
        subprocess.run([self._launcher, *words], check=True, stdout=subprocess.DEVNULL, timeout=START_LIMIT_S)
        for replica in self.replicas:
            self.start_replica(replica)
        self._start_fronts()
        try:
            self.until_whole(START_LIMIT_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in [self._front_machine, *self.replicas]:
            machine.kill()

    def start_replica(self, machine: Machine) -> None:
        """Starts the launcher of a replica, as the service manager of a machine does when the machine starts."""
        words = ["--engine-only", "--engine-address", f"{machine.address}:{ENGINE_PORT}"]
        words += ["--engine-metrics-port", str(METRICS_PORT)]
        words += ["--testing"] if self._failpoints else []
        self._start(machine, words, {"FAILPOINTS": self._failpoints})

    def _start_fronts(self) -> None:
        words = ["--hostname", self._front_machine.address, "--port", str(API_PORT), "--api-workers", str(FRONTS)]
        self._start(self._front_machine, [*words, "--engines", ",".join(self.targets)], {})

    def _start(self, machine: Machine, words: Sequence[str], environment: Mapping[str, str]) -> None:
        runtime = self._folder / machine.namespace
        runtime.mkdir(mode=0o700, exist_ok=True)
        self._launchers[machine.namespace] = machine.start(
            [self._launcher, *self._arguments, *words, "--tls-dir", str(self._folder / "tls")],
            self._log(machine),
            ENVIRONMENT | {"XDG_RUNTIME_DIR": str(runtime)} | dict(environment),
        )

    def has_ended(self, machine: Machine) -> bool:
        """Whether the launcher of this machine has ended."""
        return self._launchers[machine.namespace].poll() is not None

    def _log(self, machine: Machine) -> Path:
        return self._folder / f"{machine.namespace}.log"

    def find(self, machine: Machine, role: str) -> list[psutil.Process]:
        """The living processes of a role (see PROGRAMS) on a machine."""
        found = []
        for pid in machine.pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if processes.runs(process, PROGRAMS[role]) and processes.living([process]):
                    found.append(process)
        # A launcher's janitor has its command line too; it is a child of the launcher.
        pids = {process.pid for process in found}
        return [process for process in found if process.ppid() not in pids]

    def target(self, machine: Machine) -> str:
        return self.targets[self.replicas.index(machine)]

    def fronts(self) -> list[psutil.Process]:
        return self.find(self._front_machine, "front")

    def notices(self) -> list[Notice]:
        """What the fronts have logged of engines, in order."""
        return list(read_notices(self._log(self._front_machine).read_text(errors="replace")))

    def log_of(self, machine: Machine) -> str:
        return self._log(machine).read_text(errors="replace")

    def logs(self) -> dict[str, str]:
        return {path.name: path.read_text(errors="replace") for path in sorted(self._folder.glob("*.log"))}

    def rows(self, machine: Machine) -> int:
        """Number of requests that a replica computes; 0 if it does not say so at once."""
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

    def until_whole(self, limit_s: float = WHOLE_LIMIT_S) -> None:
        """Waits until every replica is ready and every front is connected to all of them."""
        until_s = time.monotonic() + limit_s
        while problem := self.missing():
            if time.monotonic() > until_s:
                raise RuntimeError(f"the deployment is not whole within {limit_s} s: {problem}")
            time.sleep(0.1)

    def missing(self) -> str:
        """What is missing for the deployment to be whole; empty if nothing is."""
        for machine in [self._front_machine, *self.replicas]:
            if self.has_ended(machine):
                return f"the launcher of {machine.address} has ended: {self.log_of(machine)[-2000:]}"
        unready = [machine.address for machine in self.replicas if not self.is_ready(machine)]
        if unready:
            return f"unready replicas {unready}"
        return self._missing_connections()

    def _missing_connections(self) -> str:
        lost = {}
        for notice in self.notices():
            lost[notice.front, notice.target] = notice.is_lost
        if len(self.fronts()) < FRONTS or len(lost) < FRONTS * len(self.targets) or any(lost.values()):
            return f"{len(self.fronts())} fronts; whether front and engine have lost each other: {lost}"
        return ""


def read_notices(log: str) -> Iterator[Notice]:
    for line in log.splitlines():
        if not line.startswith("{"):
            continue
        with contextlib.suppress(json.JSONDecodeError):  # a line cut by a kill
            entry: dict[str, Any] = json.loads(line)
            found = re.match(r"engine (\S+) is (connected|lost)[:,] (.*)", str(entry.get("message", "")))
            if found:
                at_s = datetime.fromisoformat(entry["timestamp"]).timestamp()
                front = str(entry.get("worker", ""))
                yield Notice(at_s, found[1], front, found[2] == "lost", found[3])
