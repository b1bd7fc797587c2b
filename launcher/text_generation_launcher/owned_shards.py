"""Shards and the process that owns their queue and token slots, a router or an engine: kept alive side by side."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

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
    ) -> None:
        """`start_owner` and `on_listening`: see KeptProcess. `on_shards` is called when the shards become ready, and
        when they are lost; `on_owner_end` when the owner has ended without being asked to."""
        self._num_shard = spawner.plan.num_shard
        self._on_shards = on_shards
        self._on_end = on_owner_end
        self.owner = KeptProcess(
            start_owner, title, self._on_message, self._on_owner_end, Restarts(), on_listening=on_listening
        )
        self._epochs = Epochs(
            partial(spawner.start_shard, site),
            [site.place.socket(rank) for rank in range(self._num_shard)],
            self._notify,
            site.place.clear,
            Restarts(max_failures=MAX_DEATHS),
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

    def _on_owner_end(self) -> None:
        """Replaces the shards if there are several: a step of the dead router or engine may have reached only some
        ranks, which then wait for the other ranks in a collective. A single shard continues with the next one.
        """
        if self._num_shard > 1:
            self._epochs.end_ready_epoch("The webserver ended between the calls to its shards")
        self._on_end()
