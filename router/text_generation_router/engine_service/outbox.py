"""The messages that wait to be sent to one front."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from text_generation_proto import engine_pb2 as pb
from text_generation_router.errors import FrontLostError

# Seconds for which a front may leave a message unread, and bytes that may wait for it.
STALL_S = 3.0
MAX_BYTES = 64 * 2**20


class Outbox:
    """Messages in their order. `put` never waits and never fails: if the front does not read, `run` raises
    FrontLostError.
    """

    def __init__(self, stall_s: float | None = None, max_bytes: int = MAX_BYTES) -> None:
        self._stall_s = STALL_S if stall_s is None else stall_s
        self._max_bytes = max_bytes
        self._messages: deque[tuple[pb.EngineMessage, int]] = deque()  # each with its size
        self._bytes = 0
        self._is_full = self._is_closing = False
        self._changed = asyncio.Event()

    def put(self, message: pb.EngineMessage) -> None:
        if self._is_full:
            return
        size = message.ByteSize()
        self._bytes += size
        self._messages.append((message, size))
        if self._bytes > self._max_bytes:
            self._is_full = True
            self._messages.clear()
        self._changed.set()

    def close(self) -> None:
        """Lets `run` end once it has sent the waiting messages. `run` must not be cancelled while it writes: gRPC then
        loses track of what it has sent, and cannot end the call."""
        self._is_closing = True
        self._changed.set()

    async def run(self, write: Callable[[pb.EngineMessage], Awaitable[None]]) -> None:
        """Sends messages until `close` is called. Raises FrontLostError."""
        while not self._is_closing:
            await self._changed.wait()
            while self._messages:
                message, size = self._messages.popleft()
                try:
                    async with asyncio.timeout(self._stall_s):
                        await write(message)
                except TimeoutError:
                    raise FrontLostError(f"nothing was read for {self._stall_s:g} s") from None
                self._bytes -= size
            if self._is_full:
                raise FrontLostError(f"more than {self._max_bytes} bytes wait to be read")
            self._changed.clear()
