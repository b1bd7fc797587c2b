"""A deployment whose replicas' launchers are started on their machines by themselves, as by a service manager."""

from collections.abc import Sequence
from pathlib import Path

import httpx
from cluster import ARGUMENTS, Deployment
from machines import Machine, Network
from server_process import LAUNCHER, wait_until

from text_generation_benchmark.metrics import metric

ENGINE_PORT, METRICS_PORT = 5000, 5001
# Longest time in seconds that a replica may take to leave: its requests move, and those of a long text may end there.
LEAVE_LIMIT_S = 120.0


class DeploymentByHand(Deployment):
    """Each machine but the first has a replica, at the same address for ever."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        arguments: Sequence[str] = ARGUMENTS,
        failpoints: str = "",
        launcher: Path = LAUNCHER,
    ) -> None:
        super().__init__(network, folder, arguments, failpoints, launcher)
        self.targets = [f"{machine.address}:{ENGINE_PORT}" for machine in self.others]

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
