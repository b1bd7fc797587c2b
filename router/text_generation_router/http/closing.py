"""Answers that are sent before the whole request was read, and end their connection."""

import asyncio
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

LINGER_S = 1.0
LINGER_BYTES = 2**18


class ClosingResponse(Response):
    """Gives the client up to LINGER_S seconds to read the answer: closing a socket that has unread bytes resets the
    connection, and the answer may be lost. Meanwhile at most LINGER_BYTES more of the request are read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await _rest_of(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _rest_of(receive: Receive) -> None:
    """Waits for the end of the request. Never returns if more than LINGER_BYTES of the request are left."""
    left = LINGER_BYTES
    while left > 0:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return
        left -= len(message.get("body", b""))
    await asyncio.Event().wait()
