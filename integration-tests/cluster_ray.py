"""A deployment whose replicas are on machines that Ray chooses: `text-generation-launcher --ray`."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
from cluster import API_PORT, Deployment
from machines import Machine, Network
from processes import family
from ray_nodes import RayNodes, Redis, is_raylet
from ray_service import RayService
from server_process import wait_until

from text_generation_benchmark.metrics import metric
from text_generation_common.cluster.files import role_folder
from text_generation_common.cluster.identity import Identity, Role
from text_generation_common.errors import CommandError
from text_generation_common.json_values import from_fields
from text_generation_common.link import ReplicaReport, ReplicaState
from text_generation_common.places import find_control_socket
from text_generation_launcher.certs import DEPLOYMENT
from text_generation_launcher.control_call import send_command
from text_generation_proto import engine_pb2 as pb
from text_generation_proto import engine_pb2_grpc as pb_grpc

REPLICAS = 3
ACTOR = "ray::ReplicaHost"  # the title that Ray gives the process
ENGINE_ANSWER_S = 1.0
LEAVE_LIMIT_S, RAY_LIMIT_S = 180.0, 300.0


class RayDeployment(Deployment):
    """The first machine has the fronts and Ray's head, whose state is in Redis. Each other machine has room for one
    replica, and one machine more than there are replicas is spare: it takes the replica of a machine that is lost. The
    last machine has Redis."""

    def __init__(self, network: Network, folder: Path, *more: Any, **options: Any) -> None:
        super().__init__(network, folder, *more, **options)
        *self.others, self._store = self.others
        ray = folder / "ray"
        ray.mkdir(mode=0o700, exist_ok=True)
        self._redis = Redis(self._store, ray)
        self._nodes = RayNodes(ray, network, 1, head_cpus=0, redis=self._redis, count=1 + len(self.others))
        self._service = RayService(self._nodes, self._environment)

    def __exit__(self, *exception: object) -> None:
        self._service.end()
        super().__exit__(None, None, None)
        self._service.join()
        self._store.kill()

    def _environment(self, machine: Machine) -> Mapping[str, str]:
        """What a replica has of its machine's Ray."""
        return {"XDG_RUNTIME_DIR": str(self.runtime(machine)), "FAILPOINTS": self.failpoints}

    def _start_all(self) -> None:
        self._redis.start()
        self._service.start()
        wait_until(lambda: not self._service.missing(), RAY_LIMIT_S, "Ray starts on every machine")
        words = ["--ray", self._nodes.address, "--replicas", str(REPLICAS), "--replica-cores", "1"]
        words += ["--testing"] if self.failpoints else []
        self.start_fronts(words, self._nodes.environment(self.front_machine))

    def log_of(self, machine: Machine) -> str:
        """On the machines of replicas: what their launchers have logged."""
        if machine is self.front_machine:
            return super().log_of(machine)
        logs = sorted(self.runtime(machine).glob("tgi-py/ray-*/*/log"), key=lambda log: log.stat().st_mtime)
        return "".join(log.read_text(errors="replace") for log in logs)

    def report(self) -> ReplicaReport:
        """What the launcher says of the replicas."""
        path = find_control_socket(API_PORT, None, str(self.runtime(self.front_machine)))
        return from_fields(ReplicaReport, send_command(path, {"command": "replicas"}))

    @property
    def _targets(self) -> dict[str, str]:
        """The engine's address for each host that has one."""
        try:
            return {endpoint.rpartition(":")[0]: endpoint for endpoint in self.report().endpoints}
        except CommandError:
            return {}

    @property
    def replicas(self) -> list[Machine]:
        targets = self._targets
        return [machine for machine in self.others if machine.address in targets]

    def target(self, machine: Machine) -> str:
        return self._targets.get(machine.address, "")

    def is_role(self, process: psutil.Process, role: str) -> bool:
        words = process.cmdline() or [""]
        match role:
            case "raylet":
                return is_raylet(process)
            case "actor":
                return words[0].startswith(ACTOR)
            case "launcher":
                return "text_generation_launcher.cli" in words[:3]
            case "driver":
                return "text_generation_launcher.ray.driver" in words[:3]
            case _:
                return super().is_role(process, role)

    def find(self, machine: Machine, role: str) -> list[psutil.Process]:
        """As `Deployment.find`; of the roles of a replica, those of the engine that serves: an engine that another has
        replaced may end beside it."""
        found = super().find(machine, role)
        if role == "launcher":
            return [process for process in found if _address_of(process) == self.target(machine)]
        if role in ("shard", "engine"):
            launchers = {process.pid for process in self.find(machine, "launcher")}
            return [process for process in found if launchers & {parent.pid for parent in process.parents()}]
        return found

    def rows(self, machine: Machine) -> int:
        try:
            with self._engine(self.target(machine)) as engine:
                page = engine.Metrics(pb.MetricsRequest(), timeout=ENGINE_ANSWER_S)
        except grpc.RpcError:
            return 0
        return int(metric(page.text.decode(), "tgi_batch_current_size"))

    def is_ready(self, target: str) -> bool:
        """Whether the engine says that its shards answer."""
        try:
            with self._engine(target) as engine:
                return bool(engine.Health(pb.HealthRequest(), timeout=ENGINE_ANSWER_S).is_healthy)
        except grpc.RpcError:
            return False

    @contextlib.contextmanager
    def _engine(self, target: str) -> Iterator[pb_grpc.EngineServiceStub]:
        """An engine's service, with the certificate of a front. grpc.RpcError, at a call, for one that is not there."""
        folder = role_folder(self.tls, Role.FRONT, self.front_machine.address)
        ca, key, chain = ((folder / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
        name = Identity(DEPLOYMENT, Role.ENGINE).server_name(target.rpartition(":")[0])
        options = [("grpc.ssl_target_name_override", name), ("grpc.enable_http_proxy", 0)]
        # Port 9 of this machine, where nothing listens, stands for an engine whose address is not known.
        with grpc.secure_channel(
            target or "127.0.0.1:9", grpc.ssl_channel_credentials(ca, key, chain), options
        ) as channel:
            yield pb_grpc.EngineServiceStub(channel)

    def kill_machine(self, machine: Machine) -> None:
        self._service.turn_off(self._number(machine), machine.kill)

    def start_machine(self, machine: Machine) -> None:
        self._service.turn_on(self._number(machine))

    def kill_head(self) -> None:
        """Ray's processes on the first machine die, and are not started before `start_head`."""
        self._service.turn_off(0, self._kill_head)

    def start_head(self) -> None:
        self._service.turn_on(0)

    def _kill_head(self) -> None:
        ours = {process.pid for process in family(self.launcher(self.front_machine).pid)}
        for pid in set(self.front_machine.pids()) - ours:
            try:
                psutil.Process(pid).kill()
            except psutil.NoSuchProcess:
                continue

    def _number(self, machine: Machine) -> int:
        return 1 + self.others.index(machine)

    def restart_launcher(self, machine: Machine) -> None:
        """Nothing: the replica's actor tells that it has ended, and another is started."""

    def leave(self, machines: Sequence[Machine]) -> bool:
        """The launcher chooses which replicas leave: their number is that of `machines`."""
        remaining = REPLICAS - len(machines)
        self._scale(remaining)
        wait_until(lambda: len(self._targets) == remaining, LEAVE_LIMIT_S, "replicas leave")
        return True

    def come_back(self, machines: Sequence[Machine]) -> None:
        self._scale(REPLICAS)

    def _scale(self, number: int) -> None:
        runtime = str(self.runtime(self.front_machine))
        self.command(
            "scale", str(number), "--port", str(API_PORT), environment=os.environ | {"XDG_RUNTIME_DIR": runtime}
        )

    def missing(self) -> str:
        if self.has_ended(self.front_machine):
            return f"the launcher has ended: {self.log_of(self.front_machine)[-2000:]}"
        try:
            report = self.report()
        except CommandError as error:
            return str(error)
        if report.count(ReplicaState.READY) < REPLICAS or len(report.replicas) > REPLICAS:
            return str([f"{note.name} {note.state} {note.endpoint} {note.reason}" for note in report.replicas])
        problem = self._service.missing() or self.missing_connections(report.endpoints)
        if problem:
            return problem
        unready = [endpoint for endpoint in report.endpoints if not self.is_ready(endpoint)]
        return f"unready replicas {unready}" if unready else ""


def _address_of(launcher: psutil.Process) -> str:
    """What a launcher has written of its engine's address."""
    words = launcher.cmdline()
    if "--engine-address-file" not in words:
        return ""
    try:
        return Path(words[words.index("--engine-address-file") + 1]).read_text().strip()
    except FileNotFoundError:
        return ""
