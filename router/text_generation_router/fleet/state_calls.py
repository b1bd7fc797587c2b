"""The State call of a front to one engine: made while that engine is watched, and made again after a break."""

import asyncio
from typing import Any

import grpc

from text_generation_common.json_values import from_json
from text_generation_common.tasks import cancelled
from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.protocol import StateNews, StateWatcher
from text_generation_router.wire.version import VERSION

OLDER = "this engine is older: it shows no state"
AWAY = "this engine is not connected"
# Seconds until a call that broke is made again.
PAUSE_S = 0.5
MAX_BYTES = 64 * 2**10


class StateCalls:
    def __init__(self, front_id: str) -> None:
        self._front_id = front_id
        self._stub: Any = None
        self._watcher: StateWatcher | None = None
        self._task: asyncio.Task[None] | None = None

    def watch(self, watcher: StateWatcher | None) -> None:
        """See `Watchable.watch_state`."""
        self._watcher = watcher
        if self._task is not None:
            self._task.cancel()
        if watcher is not None:
            self._begin(watcher)

    def connected(self, stub: Any) -> None:
        self._stub = stub
        if self._watcher is not None:
            self._begin(self._watcher)

    def _begin(self, watcher: StateWatcher) -> None:
        if self._stub is None:
            watcher(StateNews(problem=AWAY))
        else:
            self._task = asyncio.create_task(self._call(self._stub, watcher), name="states of an engine")

    async def _call(self, stub: Any, watcher: StateWatcher) -> None:
        while True:
            call = stub.State(pb.StateRequest(version=VERSION, front_id=self._front_id))
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    watcher(_news_of(message.state))
                is_older = await call.code() is grpc.StatusCode.UNIMPLEMENTED
            except grpc.aio.AioRpcError as error:
                is_older = error.code() is grpc.StatusCode.UNIMPLEMENTED
            finally:
                call.cancel()
            if is_older:
                return watcher(StateNews(problem=OLDER))
            await asyncio.sleep(PAUSE_S)

    async def lost(self) -> None:
        """Notes that the engine is not connected any more."""
        self._stub = None
        if self._task is not None:
            await cancelled(self._task)
        if self._watcher is not None:
            self._watcher(StateNews(problem=AWAY))


def _news_of(state: bytes) -> StateNews:
    """What the engine has sent, if it is what it has to be: the page gets it as it is."""
    try:
        if len(state) > MAX_BYTES or b"\n" in state:
            raise ValueError("not one line of at most 64 KiB")
        from_json(dict[str, object], state)
    except ValueError:
        return StateNews(problem="this engine sends a state that cannot be read")
    return StateNews(state)
