"""Starts at most one request per turn of the event loop; owners take turns. Between two starts the loop does its other
work, so that a burst of requests delays neither running streams nor another owner's request.
"""

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from text_generation_router.fairness.loop_turns import LoopTurns
from text_generation_router.http.caller import Callers


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


def paced(app: ASGIApp, callers: Callers) -> ASGIApp:
    """The application, each of whose requests begins when its owner's turn comes."""
    starts = Starts()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await starts.turn_of(callers.owner_of(Request(scope)))
        await app(scope, receive, send)

    return answer
