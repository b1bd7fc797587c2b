"""The processes that serve requests: one router or, with --api-workers, an engine and its fronts.

The owner of the queue and the token slots is told of the shards: the router, or the engine. Fronts know the engine
only.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from text_generation_common.link import LinkMessage
from text_generation_common.tasks import cancelled
from text_generation_launcher.kept_process import KeptProcess
from text_generation_launcher.restarts import Restarts
from text_generation_launcher.spawner import Spawner


class ServingProcesses:
    """Keeps the processes alive. `run` is to be started as a task. `on_message` is called with the owner's messages
    about shards, `on_owner_end` when the owner has ended without being asked to.
    """

    def __init__(
        self, spawner: Spawner, on_message: Callable[[LinkMessage], None], on_owner_end: Callable[[], None]
    ) -> None:
        self._fronts: list[KeptProcess]
        self._engine: KeptProcess | None = None
        if workers := spawner.plan.api_workers:
            self._owner = self._engine = KeptProcess(
                spawner.start_engine, "Engine", on_message, on_owner_end, Restarts()
            )
            self._fronts = [_front(spawner, number) for number in range(workers)]
        else:
            self._owner = KeptProcess(spawner.start_router, "Webserver", on_message, on_owner_end, Restarts())
            self._fronts = [self._owner]

    @property
    def has_listened(self) -> bool:
        """Whether requests were served."""
        return any(front.has_listened for front in self._fronts)

    def notify(self, message: LinkMessage) -> None:
        """Tells the owner that shards are ready or lost."""
        self._owner.notify(message)

    def stop(self) -> None:
        """Asks the fronts to end, which they do when their requests are done; then the engine; then `run` returns."""
        for front in self._fronts:
            front.stop()

    async def run(self) -> None:
        """Keeps the processes running until `stop`. Raises a CommandError when another start would not help."""
        fronts = {asyncio.create_task(front.run()) for front in self._fronts}
        engine = {asyncio.create_task(self._engine.run())} if self._engine is not None else set()
        try:
            while running := {task for task in fronts if not task.done()}:
                done, _ = await asyncio.wait(running | engine, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            if self._engine is not None:
                self._engine.stop()
                await asyncio.gather(*engine)
        finally:
            await cancelled(*fronts, *engine)


def _front(spawner: Spawner, number: int) -> KeptProcess:
    return KeptProcess(
        partial(spawner.start_front, number),
        f"Webserver {number}",
        _ignore,
        lambda: None,
        Restarts(),
        waits_for_shards=False,
    )


def _ignore(message: LinkMessage) -> None:
    """Fronts have no messages about shards."""
