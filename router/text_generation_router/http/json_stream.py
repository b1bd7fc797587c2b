"""A JSON array that is sent while it is being made, because the whole array would take too much memory."""

from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from text_generation_router.http.disconnect import send_unless_disconnected


class JsonStream(Response):
    """A JSON array: sends `[`, `first`, `pieces` and `]`. The pieces contain their commas. An error after the first
    piece ends the connection before the array is complete.
    """

    def __init__(self, pieces: AsyncGenerator[bytes, None], first: bytes) -> None:
        self.status_code = 200
        self.media_type = None
        self.background = None
        self.init_headers({"content-type": "application/json"})
        self._pieces = pieces
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_unless_disconnected(receive, self._pieces, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": b"[" + self._first, "more_body": True})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"]", "more_body": False})
