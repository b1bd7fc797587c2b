"""Lets requests begin one in each turn of the event loop, owners in turn. Between two turns the loop does what else is
due, so that a burst of requests holds up neither running streams nor another owner's request."""

import asyncio
from collections import OrderedDict, deque

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from text_generation_router.api.caller import Callers

Line = deque[asyncio.Future[None]]


class Starts:
    def __init__(self) -> None:
        self._lines: OrderedDict[str, Line] = OrderedDict()  # by owner; the first line has the next start
        self._is_taken = False  # the start of this turn of the event loop

    async def turn_of(self, owner: str) -> None:
        """Returns at once if no other request has begun in this turn of the event loop."""
        if not self._is_taken:
            self._is_taken = True
            asyncio.get_running_loop().call_soon(self._next)
            return
        start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(start)
        await start

    def _next(self) -> None:
        """A new turn has begun."""
        while self._lines:
            owner, line = self._lines.popitem(last=False)
            start = line.popleft()
            if line:
                self._lines[owner] = line
            if not start.done():  # else its request was cancelled
                start.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False


class Paced:
    """The application, whose requests begin when it is their turn."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers
        self._starts = Starts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._starts.turn_of(self._callers.owner_of(Request(scope)))
        await self._app(scope, receive, send)
