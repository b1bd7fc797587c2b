"""JSON that is sent while it is being made, because the whole would take too much memory."""

from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from text_generation_router.http.disconnect import send_unless_disconnected


class JsonStream(Response):
    """JSON with an array at its end: sends `first`, `pieces` and `end`. The pieces contain their commas. An error after
    the first piece ends the connection before the JSON is complete.
    """

    def __init__(self, pieces: AsyncGenerator[bytes, None], first: bytes, end: bytes) -> None:
        self.status_code = 200
        self.media_type = None
        self.background = None
        self.init_headers({"content-type": "application/json"})
        self._pieces = pieces
        self._first = first
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_unless_disconnected(receive, self._pieces, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": self._end, "more_body": False})
