"""A thread pool for work that releases the interpreter lock. Its threads are shared equally between owners, and between
an owner's tenants.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from text_generation_router.fairness.slots import FairSlots
from text_generation_router.scheduling.share import Share

T = TypeVar("T")


class FairThreads:
    def __init__(self, threads: int, max_waiting: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._slots = FairSlots(threads, max_waiting)

    async def run(self, share: Share, cost: float, work: Callable[[], T]) -> T:
        """Runs `work` in a thread and returns its result. Raises OverloadedError if too many calls of the tenant wait,
        or if no thread was free within fair_slots.WAIT_S seconds.
        """
        await self._slots.acquire(share, cost)
        loop = asyncio.get_running_loop()
        try:
            job = self._executor.submit(work)
        except BaseException:
            self._slots.release(share)
            raise

        def free_slot(_: object) -> None:
            with suppress(RuntimeError):  # the event loop is closed, so no call waits any more
                loop.call_soon_threadsafe(self._slots.release, share)

        # The slot is freed when the work ends, not when the caller does: a cancelled caller leaves its thread working.
        job.add_done_callback(free_slot)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
