"""A gate for requests that need computing. It counts unfinished requests, and refuses new requests during shutdown."""

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from text_generation_router.errors import ShuttingDownError
from text_generation_router.fairness import LoopTurns
from text_generation_router.http.caller import Callers
from text_generation_router.http.dialects import ErrorDialects
from text_generation_router.http.errors import error_response

# Starts at most one request per turn of the event loop; owners take turns. Between two starts the loop does its other
# work, so that a burst of requests delays neither running streams nor another owner's request.


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


class Gate:
    def __init__(self) -> None:
        self.is_shut = False
        self.num_unfinished = 0
        self._emptied = asyncio.Event()
        self._emptied.set()

    def shut(self) -> None:
        """Refuses new requests from now on. Requests that have already been let in continue."""
        self.is_shut = True

    def enter(self) -> None:
        self.num_unfinished += 1
        self._emptied.clear()

    def leave(self) -> None:
        self.num_unfinished -= 1
        if not self.num_unfinished:
            self._emptied.set()

    async def is_empty_within(self, seconds: float) -> bool:
        if not self.num_unfinished:
            return True
        try:
            await asyncio.wait_for(self._emptied.wait(), seconds)
        except TimeoutError:
            return False
        return True


def gated(app: ASGIApp, gate: Gate, dialects: ErrorDialects) -> ASGIApp:
    """The application behind a gate. POST requests need computing and are stopped by a closed gate; other methods only
    report state and pass.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            return await app(scope, receive, send)
        if gate.is_shut:
            return await error_response(ShuttingDownError(), dialects.of(scope["path"]))(scope, receive, send)
        gate.enter()
        try:
            await app(scope, receive, send)
        finally:
            gate.leave()

    return answer
