"""Server-sent events: written straight to a connection, or by one send over plain ASGI for each event that was not. The
generation ends when its client disconnects.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from text_generation_router.http.disconnect import send_unless_disconnected

# Events written straight to a connection, in the callback that has made them: no task wakes up for each event.

# The ASGI extension in which `Connection` gives an application the response that belongs to a request.
EXTENSION = "text_generation_router.response"

EMPTY_COMMENT = b":\n\n"


class DirectWriter:
    """Writes parts of one response's body, past ASGI's `send`: the same bytes, in fewer calls. Closed before the
    response has started, while the client does not read (the transport has paused writing), and after the response; and
    always if the server is not `Connection`. A caller that finds it closed must use `send`, which waits for the client.
    """

    __slots__ = ("_clock", "_cycle", "keep_alive", "last_sent_s")

    def __init__(self) -> None:
        self.last_sent_s = 0.0
        self.keep_alive = EMPTY_COMMENT  # what is sent after a long silence
        self._cycle: RequestResponseCycle | None = None

    def start(self, scope: Scope) -> None:
        """To be called when `send` has started the response."""
        self._clock = asyncio.get_running_loop().time
        self._cycle = scope.get("extensions", {}).get(EXTENSION)
        self.note_sent()

    def note_sent(self) -> None:
        self.last_sent_s = self._clock()

    @property
    def is_open(self) -> bool:
        cycle = self._cycle
        return (
            cycle is not None
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
            and cycle.chunked_encoding is True
        )

    def write(self, events: Sequence[bytes]) -> None:
        """Writes each event as a chunk of its own. May be called only while `is_open`."""
        assert self._cycle is not None
        chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
        self._cycle.transport.write(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        self.last_sent_s = self._clock()


# Seconds of silence after which a sign of life is sent. Clients that give up after 10 s of silence wait through a long
# prompt, also if the event loop is late.
KEEP_ALIVE_S = 8.0


class EventStream(Response):
    """A stream of events. `events` yields whole events as bytes. `close` is always called, even if `events` was never
    started.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        close: Callable[[], None] = lambda: None,
        writer: DirectWriter | None = None,
        keep_alive_s: float | None = None,
    ) -> None:
        """`writer`: the writer of events that `events` does not yield."""
        self.status_code = 200
        self.media_type = None
        self.background = None
        self.init_headers({"content-type": "text/event-stream", "cache-control": "no-cache", **headers})
        self._events = events
        self._close = close
        self._keep_alive_s = keep_alive_s or KEEP_ALIVE_S
        self._writer = writer or DirectWriter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send_unless_disconnected(receive, self._events, self._send_all(scope, send))
        finally:
            self._close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._writer.start(scope)
        keeper = asyncio.create_task(self._keep_alive(send))
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                self._writer.note_sent()
        finally:
            keeper.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """Sends the writer's `keep_alive` after `keep_alive_s` seconds without an event, so that proxies keep the
        connection."""
        clock = asyncio.get_running_loop().time
        while True:
            silence_s = clock() - self._writer.last_sent_s
            if silence_s >= self._keep_alive_s:
                await send({"type": "http.response.body", "body": self._writer.keep_alive, "more_body": True})
                self._writer.note_sent()
                silence_s = 0.0
            await asyncio.sleep(self._keep_alive_s - silence_s)
