"""A replica on some machine of a Ray cluster, as the launcher's set of replicas sees it."""

import asyncio
import logging
from collections.abc import Callable

from text_generation_launcher.errors import RayFailed
from text_generation_launcher.ray.client import RayClient
from text_generation_launcher.ray.values import RayPhase, RayStatus

logger = logging.getLogger("text_generation_launcher")

# Starts in a row without serving after which the replica counts as failed. Ray has tried other machines by then.
MOST_FAILURES = 5
CHECK_S = 1.0
# Seconds of Ray's silence after which a server that stops waits no longer for a replica's end.
GIVE_UP_S = 30.0


class RayReplica:
    """A `Replica`. `on_change` is called when its endpoint or readiness changes."""

    def __init__(self, number: int, client: RayClient, on_change: Callable[[], None]) -> None:
        self.name = f"replica {number}"
        self._number = number
        self._client = client
        self._on_change = on_change
        self._status: RayStatus | None = None
        self._over = asyncio.Event()  # set when the replica is gone or has failed
        self._is_stopping = False

    @property
    def endpoint(self) -> str | None:
        return (self._status.address or None) if self._status is not None else None

    @property
    def is_ready(self) -> bool:
        return self._status is not None and self._status.phase is RayPhase.SERVING

    @property
    def is_pending(self) -> bool:
        return self._status is not None and self._status.phase is RayPhase.PENDING

    @property
    def waits_for(self) -> str:
        if self._status is None or self.is_ready:
            return ""
        return "no machine of the Ray cluster has room" if self.is_pending else self._status.why

    async def run(self) -> None:
        """See `Replica`. Raises RayFailed after MOST_FAILURES starts without serving."""
        self._client.want(self._number, self._take)
        try:
            while not self._over.is_set():
                try:
                    await asyncio.wait_for(self._over.wait(), CHECK_S)
                except TimeoutError:
                    if self._is_stopping and self._client.silent_s > GIVE_UP_S:
                        where = self.endpoint or "an unknown address"
                        logger.warning("%s: Ray does not answer; its engine (%s) ends without fronts", self.name, where)
                        return
            if self._status is not None:
                raise RayFailed(f"{self.name} did not serve in {MOST_FAILURES} starts: {self._status.why}")
        finally:
            self._client.forget(self._number)

    def stop(self) -> None:
        """See `Replica`."""
        self._is_stopping = True
        self._client.drop(self._number)

    def _take(self, status: RayStatus | None) -> None:
        self._status = status
        if status is None or (status.failures >= MOST_FAILURES and not self._is_stopping):
            self._over.set()
        self._on_change()
