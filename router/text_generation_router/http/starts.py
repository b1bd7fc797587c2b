"""Starts at most one request per turn of the event loop; owners take turns. Between two starts the loop does its other
work, so that a burst of requests delays neither running streams nor another owner's request.
"""

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from text_generation_router.http.caller import Callers
from text_generation_router.loop_turns import LoopTurns


class Starts:
    def __init__(self) -> None:
        self._turns = LoopTurns(1)

    async def turn_of(self, owner: str) -> None:
        """Waits until the request may begin: at once if no other request has begun in this turn of the event loop."""
        start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.put(owner, partial(_begin, start))
        await start


def _begin(start: asyncio.Future[None]) -> bool:
    if start.done():  # the request was cancelled
        return False
    start.set_result(None)
    return True


class Paced:
    """Wraps the application so that each request begins when its owner's turn comes."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers
        self._starts = Starts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._starts.turn_of(self._callers.owner_of(Request(scope)))
        await self._app(scope, receive, send)
