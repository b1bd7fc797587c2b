"""The values that launcher, driver and actors tell each other, as JSON. Standard library only."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """What an actor has to run, and what its machine must have for it. `argv`: the flags of an engine-only launcher
    without those of its address, which the actor chooses. `cores`: what the replica asks for on CPUs; 0: it asks for
    GPUs; None: for GPUs if the cluster has any, otherwise for one core for each shard. `program`: what to run with the
    flags; empty: the launcher of the actor's own Python."""

    argv: tuple[str, ...]
    shards: int = 1
    cores: float | None = None
    drain_s: float = 90.0  # seconds that the engine gets to end after SIGTERM, before SIGKILL
    program: tuple[str, ...] = ()

    def needs(self, has_gpus: bool) -> tuple[float, int]:
        """Cores and GPUs that Ray is asked for. `has_gpus`: whether the cluster has any GPU."""
        if self.cores == 0 or (self.cores is None and has_gpus):
            return 0.0, self.shards
        return self.cores or float(self.shards), 0

    @property
    def threads(self) -> int:
        """Threads of each shard on CPUs."""
        return max(1, int(self.cores or self.shards) // self.shards)

    @property
    def digest(self) -> str:
        """Names the order: equal for equal orders."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:8]

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of(cls, text: str) -> "EngineOrder":
        fields = json.loads(text)
        return cls(
            tuple(map(str, fields["argv"])),
            int(fields["shards"]),
            None if fields["cores"] is None else float(fields["cores"]),
            float(fields["drain_s"]),
            tuple(map(str, fields["program"])),
        )


class EnginePhase(StrEnum):
    BLOCKED = "blocked"  # the devices are used by another engine of the machine
    STARTING = "starting"
    SERVING = "serving"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an actor says of its engine. `why` explains BLOCKED and ENDED."""

    phase: EnginePhase
    address: str = ""  # HOST:PORT, once the engine serves
    pid: int = 0
    node: str = ""  # the machine's IP address in the Ray cluster
    why: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> "EngineState":
        fields = json.loads(text)
        return cls(
            EnginePhase(fields["phase"]),
            str(fields["address"]),
            int(fields["pid"]),
            str(fields["node"]),
            str(fields["why"]),
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the launcher wants of the driver, always as a whole. `replicas`: the names of the replicas that are to
    serve, each with the address that the launcher knows, or ""; all others are drained and taken away. `number`: wishes
    are counted, and a report says which was the last one before it."""

    order: EngineOrder
    replicas: Mapping[str, str]
    number: int = 0

    def text(self) -> str:
        return json.dumps({"order": self.order.text(), "replicas": dict(self.replicas), "number": self.number})

    @classmethod
    def of(cls, text: str) -> "Wanted":
        fields = json.loads(text)
        known = {str(name): str(address) for name, address in fields["replicas"].items()}
        return cls(EngineOrder.of(fields["order"]), known, int(fields["number"]))


class RayPhase(StrEnum):
    PENDING = "pending"  # no machine of the cluster has room
    STARTING = "starting"  # the engine of the replica starts, or the driver waits before it starts
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class RayStatus:
    """What the driver says of one replica. `address` may stand in every phase: an engine whose actor is lost, or that
    drains, may serve on. `failures`: starts in a row after which the replica did not serve."""

    name: str
    phase: RayPhase
    address: str = ""
    node: str = ""
    why: str = ""
    failures: int = 0


@dataclass(frozen=True, slots=True)
class RayReport:
    """What the driver says of all replicas; sent at each change, and each second as a sign of life. `number`: that of
    the last wish that it knows."""

    replicas: tuple[RayStatus, ...]
    number: int = 0

    def text(self) -> str:
        return json.dumps({"replicas": [asdict(status) for status in self.replicas], "number": self.number})

    @classmethod
    def of(cls, text: str) -> "RayReport":
        fields = json.loads(text)
        return cls(tuple(map(_status, fields["replicas"])), int(fields["number"]))


def _status(fields: Mapping[str, Any]) -> RayStatus:
    return RayStatus(
        str(fields["name"]),
        RayPhase(fields["phase"]),
        str(fields["address"]),
        str(fields["node"]),
        str(fields["why"]),
        int(fields["failures"]),
    )
