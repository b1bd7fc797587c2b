"""The values that launcher, driver and actors send to each other, as JSON (common `json_values.py`)."""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from text_generation_common.autoscaling import Demand
from text_generation_common.json_values import as_json

LAUNCHER = (sys.executable, "-m", "text_generation_launcher.cli")
# Files of a launcher that an actor runs, in the launcher's folder: where its engine serves, where its fronts find
# engines, and the beginning of the names of its sockets.
ADDRESS_FILE, ENGINES_FILE, SOCKETS = "address", "engines", "s"


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """What an actor has to run, and what its machine must have for it. `argv`: the flags of an engine-only launcher,
    without its address, which the actor chooses. `cores`: number of CPU cores that the replica needs; 0: it needs GPUs;
    None: GPUs if the cluster has any, otherwise one core for each shard. `program`: the command before the flags;
    empty: the launcher of the actor's own Python."""

    argv: tuple[str, ...]
    shards: int = 1
    cores: float | None = None
    drain_s: float = 90.0  # seconds that the engine gets to end after SIGTERM, before SIGKILL
    program: tuple[str, ...] = ()

    def needs(self, has_gpus: bool) -> tuple[float, int]:
        """Numbers of cores and GPUs that Ray is asked for. `has_gpus`: whether the cluster has any GPU."""
        if self.cores == 0 or (self.cores is None and has_gpus):
            return 0.0, self.shards
        return self.cores or float(self.shards), 0

    @property
    def threads(self) -> int:
        """Threads of each shard on CPUs."""
        return max(1, int(self.cores or self.shards) // self.shards)

    def command(self, node: str, folder: Path) -> tuple[str, ...]:
        """What to run on the machine `node`: the kernel chooses the port."""
        program = self.program or (*LAUNCHER, "--engine-only")
        address = f"[{node}]:0" if ":" in node else f"{node}:0"
        where = ("--engine-address", address, "--engine-address-file", str(folder / ADDRESS_FILE))
        return (*program, *self.argv, *where)


@dataclass(frozen=True, slots=True)
class FrontOrder:
    """The fronts that an actor has to run, on one machine. `argv`: the flags of a launcher without those that the actor
    chooses. `hostname`: the address on which the fronts listen; empty: the machine's address in the cluster. `program`:
    as in EngineOrder."""

    argv: tuple[str, ...]
    port: int
    hostname: str = ""
    drain_s: float = 90.0  # seconds that the fronts get to end after SIGTERM, before SIGKILL
    program: tuple[str, ...] = ()

    threads = 0  # fronts have no shards, so OMP_NUM_THREADS is not set for them

    def command(self, node: str, folder: Path) -> tuple[str, ...]:
        where = (
            "--hostname",
            self.hostname or node,
            "--port",
            str(self.port),
            "--shard-uds-path",
            str(folder / SOCKETS),
        )
        return (*(self.program or LAUNCHER), *self.argv, *where, "--engines-file", str(folder / ENGINES_FILE))


Order = EngineOrder | FrontOrder


def digest_of(order: Order) -> str:
    """A digest of the order: equal for equal orders."""
    return hashlib.sha256(as_json(order)).hexdigest()[:8]


class EnginePhase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an actor reports about its engine or its fronts. `why`: the reason of ENDED."""

    phase: EnginePhase
    address: str = ""  # HOST:PORT, once the engine or a front serves
    pid: int = 0
    node: str = ""  # the machine's IP address in the Ray cluster
    why: str = ""
    demand: Demand | None = None  # what the clients of the fronts want


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the launcher wants of the driver; each message replaces the one before. `replicas`: the names of the
    replicas that are to serve, each with the address that the launcher knows, or ""; all others are drained and
    removed. `number`: number of this message; a report repeats the number of the last message that the driver has read.
    `fronts`: what every other machine of the cluster is to run; None: nothing, and fronts that run there are drained.
    `front_restart`: name of the newest order to replace all fronts; empty: there was no such order."""

    order: EngineOrder
    replicas: Mapping[str, str]
    number: int = 0
    fronts: FrontOrder | None = None
    front_restart: str = ""


class RayPhase(StrEnum):
    PENDING = "pending"  # no machine of the cluster has room
    STARTING = "starting"  # the engine of the replica starts, or the driver waits before it starts
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class RayStatus:
    """What the driver reports about one replica, or the fronts of one machine. `address` may be set in every phase: an
    engine that drains still serves, and an engine whose machine Ray does not reach may serve. `failures`: consecutive
    starts after which no engine or front served. `demand`: what the clients of the fronts want."""

    name: str
    phase: RayPhase
    address: str = ""
    node: str = ""
    why: str = ""
    failures: int = 0
    demand: Demand | None = None


@dataclass(frozen=True, slots=True)
class RayReport:
    """What the driver reports about all replicas: sent at each change, and each second to show that the driver runs.
    `number`: number of the last `Wanted` message that the driver has read."""

    replicas: tuple[RayStatus, ...]
    number: int = 0
    fronts: tuple[RayStatus, ...] = ()
