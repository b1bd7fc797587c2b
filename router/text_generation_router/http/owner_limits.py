"""Limits how many large bodies of one owner are in memory at once. Other large bodies wait unread, in network
buffers.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from text_generation_router.errors import OverloadedError


class OwnerLimits:
    """Lets each owner do a limited number of things at once."""

    def __init__(self, places: int, wait_s: float) -> None:
        """`places`: number of places that each owner has. `wait_s`: seconds that a body may wait for a place."""
        self._places = places
        self._wait_s = wait_s
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()  # number of bodies that hold a place or wait for one, by owner

    @property
    def owners(self) -> int:
        return len(self._semaphores)

    @asynccontextmanager
    async def one_of(self, owner: str) -> AsyncGenerator[None, None]:
        """Holds one of the owner's places inside the context. Raises OverloadedError if no place becomes free within
        `wait_s` seconds.
        """
        semaphore = self._semaphores.setdefault(owner, asyncio.Semaphore(self._places))
        self._users[owner] += 1
        try:
            await self._acquire(semaphore)
            try:
                yield
            finally:
                semaphore.release()
        finally:
            self._users[owner] -= 1
            if not self._users[owner]:
                del self._users[owner], self._semaphores[owner]

    async def _acquire(self, semaphore: asyncio.Semaphore) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await semaphore.acquire()
        except TimeoutError:
            raise OverloadedError from None
