"""What a set of replicas needs of each: an engine and its shards, on this machine or elsewhere."""

from collections.abc import Callable
from typing import Protocol


class AnyReplica(Protocol):
    """`run` is started as a task, once."""

    @property
    def name(self) -> str: ...

    @property
    def endpoint(self) -> str | None:
        """Where fronts connect, as text (`cluster/endpoints.py`); None: nowhere yet. Fronts may connect before the
        replica is ready, and try again until they can."""

    @property
    def is_ready(self) -> bool:
        """Whether its engine serves and its shards are ready."""

    @property
    def is_pending(self) -> bool:
        """Whether no machine has room for the replica, which starts once one has."""

    @property
    def waits_for(self) -> str:
        """Why the replica is not ready, as far as there is something to say; "": nothing."""

    async def run(self) -> None:
        """Keeps the replica alive, and returns after `stop`. Raises a CommandError when the replica cannot be kept
        alive; it may be made again later. In both cases nothing of it is left running. When the task is cancelled, its
        children live on: the supervisor stops them."""

    def stop(self) -> None:
        """Lets the replica drain: it refuses new requests, its queued requests move, and the running ones end or move.
        Then `run` returns."""


# Makes the replica of a number. The callback is to be called whenever `endpoint` or `is_ready` changes.
MakeReplica = Callable[[int, Callable[[], None]], AnyReplica]
