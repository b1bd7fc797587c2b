"""What launcher and fronts tell each other about replicas: an engine and its shards each. Standard library only."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class ReplicaState(StrEnum):
    PENDING = "pending"  # no machine has room for it
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # takes no new requests, and leaves when its requests have ended or moved
    FAILED = "failed"  # waits for its next start


@dataclass(frozen=True, slots=True)
class ReplicaNote:
    """One replica, as operators see it."""

    name: str
    state: ReplicaState
    endpoint: str | None = None  # where fronts connect; None: nowhere yet
    reason: str = ""  # why the replica is not ready, as far as there is something to say


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The replicas of a server, and how many there are to be."""

    wanted: int
    replicas: tuple[ReplicaNote, ...] = ()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where fronts connect."""
        return tuple(replica.endpoint for replica in self.replicas if replica.endpoint is not None)

    def count(self, state: ReplicaState) -> int:
        return sum(replica.state is state for replica in self.replicas)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ReplicaReport":
        """ValueError, KeyError or TypeError if `fields` is not what `as_json` returns."""
        return cls(int(fields["wanted"]), tuple(_note(entry) for entry in fields["replicas"]))


def _note(fields: Mapping[str, Any]) -> ReplicaNote:
    endpoint = fields["endpoint"]
    name, reason = str(fields["name"]), str(fields["reason"])
    return ReplicaNote(name, ReplicaState(fields["state"]), None if endpoint is None else str(endpoint), reason)
