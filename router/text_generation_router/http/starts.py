"""Starts at most one request per turn of the event loop; owners take turns. Between two starts the loop does its other
work, so that a burst of requests delays neither running streams nor another owner's request.
"""

import asyncio
from collections import OrderedDict, deque

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from text_generation_router.http.caller import Callers

Line = deque[asyncio.Future[None]]


class Starts:
    def __init__(self) -> None:
        self._lines: OrderedDict[str, Line] = OrderedDict()  # waiting requests by owner; the first owner starts next
        self._is_taken = False  # whether a request has begun in this turn of the event loop

    async def turn_of(self, owner: str) -> None:
        """Waits until the request may begin: at once if no other request has begun in this turn of the event loop."""
        if not self._is_taken:
            self._is_taken = True
            asyncio.get_running_loop().call_soon(self._next)
            return
        start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(start)
        await start

    def _next(self) -> None:
        """Starts the next waiting request. Called once per turn of the event loop while requests wait."""
        while self._lines:
            owner, line = self._lines.popitem(last=False)
            start = line.popleft()
            if line:
                self._lines[owner] = line
            if not start.done():  # a start that is done was cancelled
                start.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False


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
