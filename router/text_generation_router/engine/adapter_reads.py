"""Has the shards read the files of LoRA adapters that requests wait for, so that the steps which load them do not."""

import asyncio
import logging
from collections.abc import Iterable, Mapping

from text_generation_common.tasks import cancelled
from text_generation_router.engine.protocol import NO_FOLDERS
from text_generation_router.engine.requests import Requests
from text_generation_router.engine.shards import ShardedClient
from text_generation_router.errors import ShardsError
from text_generation_router.scheduling.scheduler import Scheduler

logger = logging.getLogger("text_generation_router")

AGAIN_S = 0.2  # seconds until shards that did not answer are asked again


class AdapterReads:
    """The reads of one epoch."""

    def __init__(
        self,
        shards: ShardedClient,
        scheduler: Scheduler,
        requests: Requests,
        work: asyncio.Event,
        folders: Mapping[str, str] = NO_FOLDERS,
    ) -> None:
        """`folders`: of adapters that the shards did not have at their start, by digest."""
        self._folders = folders
        self._shards = shards
        self._scheduler = scheduler
        self._requests = requests
        self._work = work
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, adapters: Iterable[str]) -> None:
        for adapter in adapters:
            task = asyncio.create_task(self._read(adapter))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _read(self, adapter: str) -> None:
        try:
            refusal = await self._shards.prepare_adapter(adapter, self._folders.get(adapter, ""))
        except ShardsError as error:
            # A loss of the shards is found in another way. Living shards are asked again.
            logger.warning("an adapter was not read: %s", error)
            await asyncio.sleep(AGAIN_S)
            self._scheduler.adapters.note_unread(adapter)
            self._work.set()
            return
        if refusal:
            self._requests.refuse_adapter(adapter, refusal)
        else:
            self._scheduler.adapters.note_ready(adapter)
        self._work.set()

    async def close(self) -> None:
        await cancelled(*self._tasks)
