"""A page that is expensive to make, made once for all requests that wait for it."""

import asyncio
from collections.abc import Awaitable, Callable

# Shortest time between two pages, in seconds: a page of metrics takes up to 10 ms of a processor.
GAP_S = 0.05


class SharedPage:
    """Makes the page by calling `make`. A request never gets a page that is older than the
    request.
    """

    def __init__(self, make: Callable[[], Awaitable[str]], gap_s: float = GAP_S) -> None:
        self._make = make
        self._gap_s = gap_s
        self._made_s = -gap_s  # event loop time when the newest page was made
        self._next: asyncio.Task[str] | None = None

    async def read(self) -> str:
        if self._next is None:
            self._next = asyncio.create_task(self._make_next())
        # Shielded, because other requests wait for the same page when this one is cancelled.
        return await asyncio.shield(self._next)

    async def _make_next(self) -> str:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._made_s + self._gap_s - clock())
        self._next = None  # requests that come from now on get a later page
        self._made_s = clock()
        return await self._make()
