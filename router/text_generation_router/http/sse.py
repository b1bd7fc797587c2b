"""Server-sent events over plain ASGI: one send per event that was not written directly. The generation ends when its
client disconnects.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from text_generation_router.http.direct import DirectWriter
from text_generation_router.http.disconnect import send_unless_disconnected

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
