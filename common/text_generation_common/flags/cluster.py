"""Flags of servers with several processes or machines: fronts, which serve HTTP, and replicas, engines with shards."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from text_generation_common.flags.declaration import flag
from text_generation_common.flags.kinds import Topic

MAX_WORKERS, MAX_LOCAL_REPLICAS, MAX_REPLICAS = 64, 64, 1024
# With --ray several engines may run on one machine: each serves its metrics on the first free port of this many.
RAY_METRICS_PORTS = 16


class Way(Enum):
    """What one launcher starts."""

    ROUTER = "a router, which is front and engine in one process, and its shards"
    REPLICAS = "fronts and replicas on this machine"
    RAY = "fronts here, and replicas on the machines of a Ray cluster"
    FRONTS = "fronts of replicas elsewhere"
    ENGINE = "a replica for fronts elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityFlags:
    """How ports between machines are protected."""

    TOPIC: ClassVar = Topic.CLUSTER
    tls_dir: str | None = flag(
        None,
        "Folder with certificates for ports between machines, made by `text-generation-launcher certs`: that of this "
        "role and host, or the whole of DIR.",
        not_empty=True,
    )
    insecure_cluster: bool = flag(
        False, "Open ports between machines without encryption and authentication, for private networks."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineListFlags:
    """Where a front finds its engines."""

    TOPIC: ClassVar = Topic.CLUSTER
    engines: tuple[str, ...] = flag(
        (), "Addresses of engines, HOST:PORT with commas between, may be repeated: serve HTTP only, for these engines."
    )
    engines_dns: str | None = flag(
        None, "NAME:PORT: serve HTTP only, for the engines at all addresses of this DNS name, asked again every 5 s."
    )
    engines_file: str | None = flag(
        None,
        "File with addresses of engines, HOST:PORT, one in each line, or a folder of such files, as several "
        "--engine-address-file make them: serve HTTP only, for these engines. It is read again every second; while it "
        "is missing or empty, the engines that are known stay.",
    )
    resume_across_builds: bool = flag(
        False,
        "Let a request go on with an engine whose model or build is another one: its text may change in the middle.",
    )

    @property
    def is_given(self) -> bool:
        return bool(self.engines) or self.engines_dns is not None or self.engines_file is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOnlyFlags:
    """A replica for fronts elsewhere."""

    TOPIC: ClassVar = Topic.CLUSTER
    engine_only: bool = flag(False, "Serve fronts on other machines, at --engine-address, and no HTTP.")
    engine_address: str | None = flag(
        None, "HOST:PORT for the fronts of --engine-only, as they reach this machine; port 0: the kernel chooses one."
    )
    engine_address_file: str | None = flag(
        None, "File into which the engine's address is written once it serves, for --engine-only."
    )
    end_without_fronts: float = flag(
        0.0, "Seconds without any front after which --engine-only ends by itself; 0: it never does.", min=0
    )
    # Without a variable: Kubernetes sets ENGINE_METRICS_PORT to an URL if there is a service `engine-metrics`.
    engine_metrics_port: int | None = flag(
        None,
        "Port for /metrics and /health of --engine-only, as plain HTTP on the host of --engine-address; with --ray "
        f"each engine has the first free one of {RAY_METRICS_PORTS} ports from this one on.",
        env=False,
        min=1,
        max=65535,
    )
    engine_metrics_tries: int = flag(
        1,
        "Number of ports from --engine-metrics-port on, of which the engine has the first free one.",
        env=False,
        hidden=True,
        min=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RayFlags:
    """Replicas on the machines of a Ray cluster."""

    TOPIC: ClassVar = Topic.CLUSTER
    ray: str | None = flag(
        None,
        "HOST:PORT of a Ray cluster's head, or `auto` for the cluster that this machine is in: the --replicas run on "
        "its machines, and the fronts here.",
    )
    fronts_on_every_node: bool = flag(
        False,
        "Serve HTTP on --port of every machine of the Ray cluster, those that join later included, and not only where "
        "the command runs.",
    )
    replica_cores: float | None = flag(
        None,
        "Cores that each replica asks Ray for, to compute on CPUs; 0: it asks for GPUs, one for each shard. Not given: "
        "GPUs, or in a cluster without GPUs one core for each shard.",
        min=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFlags:
    TOPIC: ClassVar = Topic.CLUSTER
    api_workers: int = flag(
        0,
        "Number of processes that serve HTTP on the port (fronts), beside the engines; 0: one process does both, or, "
        "with other flags that divide it, 1.",
        min=0,
        max=MAX_WORKERS,
    )
    replicas: int | None = flag(
        None,
        "Number of replicas, each an engine with --num-shard shards: on this machine, whose cores and GPUs they share "
        "out, or with --ray on those of a cluster.",
        min=1,
        max=MAX_REPLICAS,
    )
    min_replicas: int | None = flag(
        None, "Least number of replicas when it follows the load, and the number at the start; 1 when not given.", min=1
    )
    max_replicas: int | None = flag(
        None,
        "Greatest number of replicas: it follows the load, by the wait that requests have to expect. In the place of "
        "--replicas.",
        min=1,
        max=MAX_REPLICAS,
    )
    on_ray: RayFlags = RayFlags()
    engine_list: EngineListFlags = EngineListFlags()
    engine: EngineOnlyFlags = EngineOnlyFlags()
    security: SecurityFlags = SecurityFlags()

    @property
    def way(self) -> Way:
        if self.engine.engine_only:
            return Way.ENGINE
        if self.engine_list.is_given:
            return Way.FRONTS
        if self.on_ray.ray is not None:
            return Way.RAY
        return Way.REPLICAS if self.api_workers or self.replica_limit is not None else Way.ROUTER

    @property
    def replica_limit(self) -> int | None:
        """Number of replicas for which there must be room; None: the server has one, which cannot be scaled."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def has_model_here(self) -> bool:
        """Whether shards of this launcher load the model. Otherwise only its tokenizer and its configuration are
        read here."""
        return self.way not in (Way.FRONTS, Way.RAY)
