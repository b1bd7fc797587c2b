"""The states of an engine for the fronts that ask for them: one watch of the engine, whatever their number."""

import asyncio
from collections.abc import Awaitable, Callable

from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.local import OWN_NAME, LocalEngine
from text_generation_router.engine.state_hub import StateHub
from text_generation_router.engine_service.sinks import STALL_S
from text_generation_router.errors import FrontLostError

# Seconds between two looks whether the call is to end, while there is no news.
LOOK_S = 1.0


class StateStreams:
    def __init__(self, engine: LocalEngine) -> None:
        self._hub = StateHub(engine)
        self._calls: dict[str, object] = {}  # the newest call of each front
        self._is_closing = False

    def __len__(self) -> int:
        """Number of calls that are open."""
        return self._hub.num_viewers

    async def run(self, front_id: str, write: Callable[[pb.StateMessage], Awaitable[None]]) -> None:
        """Sends states until the same front calls again, or `close` is called. Raises FrontLostError if the front does
        not read."""
        call = self._calls[front_id] = object()
        try:
            with self._hub.watching(OWN_NAME) as viewer:
                while self._calls.get(front_id) is call and not self._is_closing:
                    news = await viewer.next(LOOK_S)
                    if news is not None and news.state:
                        await _within_reach(write(pb.StateMessage(state=news.state)))
        finally:
            if self._calls.get(front_id) is call:
                del self._calls[front_id]

    def close(self) -> None:
        self._is_closing = True


async def _within_reach(writing: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(STALL_S):
            await writing
    except TimeoutError:
        raise FrontLostError(f"no state was read for {STALL_S:g} s") from None
