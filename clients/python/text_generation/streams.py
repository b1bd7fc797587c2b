"""Streams: iterators over the events of an answer, which also give its text, and the whole answer in the end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Generic, Self, TypeVar

from text_generation.errors import IncompleteGenerationError
from text_generation.loop_thread import LoopThread
from text_generation.parts import Parts

Event = TypeVar("Event")
Whole = TypeVar("Whole")


class AsyncStream(Generic[Event, Whole]):
    """The events of one answer as they arrive. The request is sent when the first event is asked for.

    Closing a stream before its end closes its connection, and the server stops generating. Use it as a context manager,
    or call `aclose()`, from any task.
    """

    def __init__(self, events: AsyncGenerator[Event, None], parts: Parts[Event, Whole]) -> None:
        self._events = events
        self._parts = parts
        self._step: asyncio.Task[Event | None] | None = None  # waits for the next event
        self._broken = False  # True: closed, or failed
        self._complete = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._broken or self._complete:
            raise StopAsyncIteration
        # A task of its own: `aclose()` in another task cancels this wait, and not the task that waits.
        step = self._step = asyncio.create_task(self._next())
        try:
            event = await step
        except BaseException:
            if step.cancelled() and not _is_cancelled():
                raise StopAsyncIteration from None
            self._broken = True
            raise
        finally:
            self._step = None
        if event is None:
            self._complete = True
            raise StopAsyncIteration
        self._parts.add(event)
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def text(self) -> AsyncIterator[str]:
        """The pieces of the answer's text that have not been read yet, without special tokens."""
        async for event in self:
            if text := self.text_of(event):
                yield text

    async def final(self) -> Whole:
        """Reads to the end, and returns the whole answer: what the same call without a stream returns. Raises
        IncompleteGenerationError if the stream was closed, or has failed, before its end.
        """
        async for _ in self:
            pass
        if not self._complete:
            raise IncompleteGenerationError("the stream ended before its last token, so there is no whole answer")
        return self._parts.whole()

    def text_of(self, event: Event) -> str:
        """The text that one event adds to the answer; of several choices, to the first. "" for a special token."""
        return self._parts.text_of(event)

    async def aclose(self) -> None:
        self._broken = True
        if self._step is not None:
            self._step.cancel()
            await asyncio.wait([self._step])
        await self._events.aclose()

    async def _next(self) -> Event | None:
        return await anext(self._events, None)


class Stream(Generic[Event, Whole]):
    """The events of one answer as they arrive, for synchronous code. The request is sent when the first event is asked
    for.

    Closing a stream before its end closes its connection, and the server stops generating. Use it as a context manager,
    or call `close()`, from any thread. A stream that is no longer referenced is closed too.
    """

    def __init__(self, events: AsyncStream[Event, Whole], loop: LoopThread, client: object) -> None:
        self._events = events
        self._loop = loop
        self._client = client  # kept, because the loop ends when its client is no longer referenced

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        event = self._loop.run(self._next())
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def text(self) -> Iterator[str]:
        """The pieces of the answer's text that have not been read yet, without special tokens."""
        for event in self:
            if text := self._events.text_of(event):
                yield text

    def text_of(self, event: Event) -> str:
        """The text that one event adds to the answer; of several choices, to the first. "" for a special token."""
        return self._events.text_of(event)

    def final(self) -> Whole:
        """Reads to the end, and returns the whole answer: what the same call without a stream returns. Raises
        IncompleteGenerationError if the stream was closed, or has failed, before its end.
        """
        return self._loop.run(self._events.final())

    async def _next(self) -> Event | None:
        return await anext(self._events, None)

    def close(self) -> None:
        self._loop.post(self._events.aclose())


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
