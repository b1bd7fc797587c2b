"""A connection to a shard's socket for steps, as bytes: sends steps, and matches the answers to them by number."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

from text_generation_common.frames import Frame, FrameError, FrameReader, pack
from text_generation_router.errors import ShardsError

T = TypeVar("T")


class StepConnection(asyncio.Protocol):
    def __init__(self, path: str) -> None:
        self._path = path
        self._frames = FrameReader()
        # The steps without an answer, by number: the future of each, and what reads its answer.
        self._unanswered: dict[int, tuple[asyncio.Future[Any], Callable[[Frame], Any]]] = {}
        self._transport: asyncio.Transport | None = None
        self._lost = f"the connection to {path} was closed"

    @classmethod
    async def open(cls, path: str, within_s: float) -> "StepConnection | None":
        """None: the shard has no such socket. ShardsError: the shard does not answer there."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(within_s):
                _, connection = await loop.create_unix_connection(lambda: cls(path), path)
        except FileNotFoundError:
            return None
        except OSError as error:  # a TimeoutError is one
            raise ShardsError(f"could not connect to {path}: {error or type(error).__name__}") from None
        return connection

    def send(self, kind: int, step: int, message: bytes, read: Callable[[Frame], T]) -> "asyncio.Future[T]":
        """Sends a step. The future has what `read` makes of the answer, or the error that `read` raises; ShardsError
        once the connection is lost."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            answer.set_exception(ShardsError(self._lost))
        else:
            self._unanswered[step] = answer, read
            self._transport.write(pack(kind, step, message))
        return answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._answer(frame)
        except FrameError as error:
            self._lost = f"{self._path}: {error}"
            self.close()

    def _answer(self, frame: Frame) -> None:
        answer, read = self._unanswered.pop(frame.step, (None, None))
        if answer is None or read is None or answer.done():
            return  # the wait for this answer was cancelled
        try:
            answer.set_result(read(frame))
        except Exception as error:  # the future's owner gets it
            answer.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._lost = f"the connection to {self._path} was lost: {error}"
        unanswered, self._unanswered = self._unanswered, {}
        for answer, _ in unanswered.values():
            if not answer.done():
                answer.set_exception(ShardsError(self._lost))
