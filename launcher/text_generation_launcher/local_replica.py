"""A replica on this machine: an engine and its shards, as children of this launcher. And shards with the process that
owns their queue and token slots, a router or an engine, kept alive side by side.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from text_generation_common.errors import CommandError
from text_generation_common.link import LinkEvent, LinkMessage
from text_generation_common.tasks import cancelled
from text_generation_launcher.config import ReplicaSite
from text_generation_launcher.epochs import Epochs
from text_generation_launcher.kept_process import KeptProcess
from text_generation_launcher.process import Child
from text_generation_launcher.restarts import MAX_DEATHS, Restarts
from text_generation_launcher.spawner import Spawner

logger = logging.getLogger("text_generation_launcher")


class OwnedShards:
    """Passes messages between the owner and what keeps the shards. `run` is to be started as a task, once."""

    def __init__(
        self,
        spawner: Spawner,
        site: ReplicaSite,
        title: str,
        start_owner: Callable[[int], Awaitable[Child]],
        on_listening: Callable[[str], None] = lambda address: None,
        on_shards: Callable[[bool], None] = lambda are_ready: None,
        on_owner_end: Callable[[], None] = lambda: None,
        on_other: Callable[[LinkMessage], None] = lambda message: None,
        adapters: Callable[[], LinkMessage | None] = lambda: None,
    ) -> None:
        """`start_owner` and `on_listening`: see KeptProcess. `on_shards` is called when the shards become ready, and
        when they are lost; `on_owner_end` when the owner has ended without being asked to, `on_other` with the owner's
        messages that are not about shards. `adapters`: see KeptProcess."""
        self._on_shards = on_shards
        self._on_other = on_other
        self.owner = KeptProcess(
            start_owner,
            title,
            self._on_message,
            on_owner_end,
            Restarts(),
            on_listening=on_listening,
            adapters=adapters,
            stands_by=lambda: spawner.router_stands_by,
        )
        self._epochs = Epochs(
            partial(spawner.start_shard, site),
            [site.place.socket(rank) for rank in range(spawner.plan.num_shard)],
            self._notify,
            site.place.clear,
            Restarts(max_failures=MAX_DEATHS),
            stands_by=partial(spawner.stands_by, site),
        )

    def stop(self) -> None:
        """Asks the owner to end, which it does when its requests are done; then `run` returns, and the shards live."""
        self.owner.stop()

    async def run(self) -> None:
        """Returns when the owner was stopped. Raises a CommandError when owner or shards cannot be kept alive. In both
        cases, and when the task is cancelled, children live on."""
        keepers = [asyncio.create_task(self._epochs.run()), asyncio.create_task(self.owner.run())]
        try:
            done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
            for keeper in done:
                keeper.result()
        finally:
            await cancelled(*keepers)

    def _notify(self, message: LinkMessage) -> None:
        self.owner.notify(message)
        self._on_shards(message.event is LinkEvent.READY)

    def _on_message(self, message: LinkMessage) -> None:
        if message.event is LinkEvent.CONFIRMED:
            self._epochs.confirm(message.epoch)
        elif message.event is LinkEvent.BLAMED:
            self._epochs.clear_failures()
        elif message.event is LinkEvent.RESTART:
            self._epochs.end_epoch(message.epoch, message.reason)
        elif message.event is LinkEvent.DESERTED:
            logger.warning("No front has been connected for %s: ending", message.reason)
            self.stop()
        else:
            self._on_other(message)


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
        for name in ("engine", "shard", "template"):
            children = self._spawner.running_as(name, self._site.number)
            await asyncio.gather(*(child.stop(timeout_s) for child in children))
        self._site.place.clear()
