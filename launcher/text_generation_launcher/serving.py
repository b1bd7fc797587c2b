"""The processes that serve requests: one router or, with --api-workers, an engine and its fronts.

The owner of the queue and the token slots is told of the shards: the router, or the engine. Fronts know the engine
only.
"""

import asyncio
import logging
from collections.abc import Callable

from text_generation_common.link import LinkMessage
from text_generation_common.tasks import cancelled
from text_generation_launcher.fronts import Fronts
from text_generation_launcher.kept_process import KeptProcess
from text_generation_launcher.restarts import Restarts
from text_generation_launcher.spawner import Spawner

logger = logging.getLogger("text_generation_launcher")

# Seconds that a draining router gets in addition to its own timeout: it may need twice 5 s for its last answers.
DRAIN_MARGIN_S = 12.0


class ServingProcesses:
    """Keeps the processes alive. `run` is to be started as a task. `on_message` is called with the owner's messages
    about shards, `on_owner_end` when the owner has ended without being asked to.
    """

    def __init__(
        self, spawner: Spawner, on_message: Callable[[LinkMessage], None], on_owner_end: Callable[[], None]
    ) -> None:
        self._serving: KeptProcess | Fronts
        self._engine: KeptProcess | None = None
        if workers := spawner.plan.api_workers:
            self._owner = self._engine = KeptProcess(
                spawner.start_engine, "Engine", on_message, on_owner_end, Restarts()
            )
            patience_s = spawner.plan.http.graceful_termination_timeout + DRAIN_MARGIN_S
            self._serving = Fronts(spawner.start_front, workers, patience_s)
        else:
            self._owner = KeptProcess(spawner.start_router, "Webserver", on_message, on_owner_end, Restarts())
            self._serving = self._owner

    @property
    def has_listened(self) -> bool:
        """Whether requests were served."""
        return self._serving.has_listened

    def notify(self, message: LinkMessage) -> None:
        """Tells the owner that shards are ready or lost."""
        self._owner.notify(message)

    def stop(self) -> None:
        """Asks the fronts to end, which they do when their requests are done; then the engine; then `run` returns."""
        self._serving.stop()

    def restart_fronts(self) -> None:
        """Replaces the fronts one after another, without the loss of a request."""
        if isinstance(self._serving, Fronts):
            self._serving.restart()
        else:
            logger.warning("The webserver is not restarted: only --api-workers has others that serve meanwhile")

    async def run(self) -> None:
        """Keeps the processes running until `stop`. Raises a CommandError when another start would not help."""
        serving = asyncio.create_task(self._serving.run())
        engine = {asyncio.create_task(self._engine.run())} if self._engine is not None else set()
        try:
            while not serving.done():
                done, _ = await asyncio.wait({serving} | engine, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            if self._engine is not None:
                self._engine.stop()
                await asyncio.gather(*engine)
        finally:
            await cancelled(serving, *engine)
