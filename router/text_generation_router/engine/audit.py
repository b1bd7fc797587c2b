"""Checks, while the engine is idle, that every token slot is accounted for and that the shards agree."""

import asyncio
import logging
import time

from text_generation_common.tasks import cancelled
from text_generation_router.engine.shards import ShardedClient
from text_generation_router.errors import ShardsError
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.scheduling.scheduler import Scheduler

logger = logging.getLogger("text_generation_router")

# Least number of seconds between two checks of the shards' numbers of rows and slots.
ASK_S = 10.0


class Audit:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._asked_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    def note_idle(self, scheduler: Scheduler, shards: ShardedClient) -> None:
        """Checks the accounts of slots and rows. To be called when no request runs or waits and no step is in
        flight.
        """
        if (wrong := scheduler.books()) is not None:
            self._report(wrong)
        now = time.monotonic()
        if now - self._asked_s >= ASK_S and (self._asking is None or self._asking.done()):
            self._asked_s = now
            self._asking = asyncio.create_task(self._ask(scheduler, shards), name="audit")

    async def _ask(self, scheduler: Scheduler, shards: ShardedClient) -> None:
        steps = scheduler.steps.newest
        try:
            views = await shards.views()
        except ShardsError:
            return  # a shard was lost: the engine reports that
        if scheduler.steps.newest != steps or not scheduler.is_idle:
            return  # a step was sent meanwhile, so the shards' numbers are out of date
        for rank, view in enumerate(views):
            if view.rows or view.slots < scheduler.memory.capacity:
                self._report(
                    f"shard {rank} holds {view.rows} rows and has {view.slots} slots; by the router's books it holds no"
                    f" row and has {scheduler.memory.capacity} slots"
                )

    def _report(self, wrong: str) -> None:
        self._metrics.books_errors.inc()
        logger.error("the books of the token slots are wrong: %s", wrong)

    async def close(self) -> None:
        if self._asking is not None:
            await cancelled(self._asking)
