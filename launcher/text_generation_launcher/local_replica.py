"""A replica on this machine: an engine and its shards, as children of this launcher."""

import asyncio
from collections.abc import Callable

from text_generation_common.errors import CommandError
from text_generation_launcher.config import ReplicaSite
from text_generation_launcher.owned_shards import OwnedShards
from text_generation_launcher.process import Child
from text_generation_launcher.spawner import Spawner

# Seconds between SIGTERM and SIGKILL for an engine and its shards that end before the server does.
STOP_S = 5.0


class LocalReplica:
    """Implements AnyReplica."""

    def __init__(
        self,
        spawner: Spawner,
        site: ReplicaSite,
        address: str,
        metrics_file: str | None,
        on_change: Callable[[], None],
    ) -> None:
        """`address`: where its engine takes fronts; with port 0 the first engine chooses one, which later ones keep.
        `metrics_file`: the file with the engine's metrics."""
        self.name = f"Replica{site.suffix}"
        self.endpoint: str | None = None
        self._spawner = spawner
        self._site = site
        self._address = address
        self.is_pending = False  # Room for it was found before its first start.
        self.waits_for = ""
        self._metrics_file = metrics_file
        self._on_change = on_change
        self._has_shards = self._serves = False
        self._shards = OwnedShards(
            spawner,
            site,
            f"Engine{site.suffix}",
            self._start_engine,
            self._on_listening,
            self._on_shards,
            self._on_engine_end,
        )

    @property
    def is_ready(self) -> bool:
        return self._has_shards and self._serves

    def stop(self) -> None:
        self._shards.stop()

    async def run(self) -> None:
        try:
            await self._shards.run()
        except CommandError:
            await self._stop_children(0.0)
            raise
        await self._stop_children(STOP_S)

    async def _start_engine(self, launcher_fd: int) -> Child:
        return await self._spawner.start_engine(self._site, self._address, self._metrics_file, launcher_fd)

    def _on_listening(self, address: str) -> None:
        self._address = self.endpoint = address or self._address
        self._serves = True
        self._on_change()

    def _on_engine_end(self) -> None:
        self._serves = False
        self._on_change()

    def _on_shards(self, are_ready: bool) -> None:
        self._has_shards = are_ready
        self._on_change()

    async def _stop_children(self, timeout_s: float) -> None:
        """Ends what is left of the replica, the engine before its shards, and removes its files."""
        for name in ("engine", "shard"):
            children = self._spawner.running_as(name, self._site.number)
            await asyncio.gather(*(child.stop(timeout_s) for child in children))
        self._site.place.clear()
